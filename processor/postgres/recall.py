"""Finds the messages that were done where they are read, so that their outputs can be made again. Claims nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from processor.postgres.claims import Claims, PriorDelivery
from processor.postgres.rows import uuids

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.messages.batch import Batch
    from processor.messages.message import Partition
    from processor.messages.record import Record

DONE = """
    SELECT key, partition_id, "offset" FROM inbox WHERE key = ANY ($1::uuid[]) AND status = 'completed'
"""


async def done(connection: Connection[Row], records: Sequence[Record]) -> dict[bytes, tuple[int, int]]:
    """Return by key of these messages where those were read that are completed: partition id and offset."""
    keys = uuids(record.key for record in records if record.in_inbox)
    return {row["key"].bytes: (row["partition_id"], row["offset"]) for row in await connection.fetch(DONE, keys)}


class Recall:
    """Stands where `Claiming` does. `forgotten_below` has the offsets below which rows may be gone."""

    def __init__(self, forgotten_below: Mapping[Partition, int]) -> None:
        self._forgotten_below = forgotten_below

    async def claim(self, connection: Connection[Row], batch: Batch) -> Claims:
        """The records whose outputs were sent: each is the one, of all with its id, that was processed.

        A type without inbox has no rows: all of its records were processed.
        """
        records = batch.as_rows()
        found = await done(connection, records)
        claims = Claims()
        for index, record in enumerate(records):
            offset = record.message.offset
            forgotten = record.key not in found and offset < self._forgotten_below.get(record.partition, 0)
            here = found.get(record.key) == (record.reading.partition_id, offset)
            if not record.not_ours and record.failure is None and (here or forgotten or not record.in_inbox):
                # Its row is a completed one and stays so: what fails now is counted in memory.
                record.in_inbox = False
                claims.mine.append(index)
            else:
                record.not_ours = True  # also in a later try of the batch, or of a part of it
                claims.skip(PriorDelivery.NOT_OURS)
        return claims
