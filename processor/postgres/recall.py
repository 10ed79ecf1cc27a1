"""Finds the messages that were done where they are read, so that their outputs can be made again. Claims nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from processor.postgres.claims import Claims, PriorDelivery
from processor.postgres.rows import uuids

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.messages.batch import Batch
    from processor.messages.message import Partition
    from processor.messages.record import Record

KNOWN = """
    SELECT key, partition_id, "offset", status = 'completed' AS done FROM inbox WHERE key = ANY ($1::uuid[])
"""


async def known(connection: Connection[Row], keys: Iterable[bytes]) -> dict[bytes, tuple[int, int] | None]:
    """Return the keys that have a row, with partition id and offset where the message was done: None if it is not."""
    return {
        row["key"].bytes: (row["partition_id"], row["offset"]) if row["done"] else None
        for row in await connection.fetch(KNOWN, uuids(keys))
    }


class Recall:
    """Stands where `Claiming` does. `forgotten_below` has the offsets below which rows may be gone."""

    def __init__(self, key_of: Callable[[str], bytes], forgotten_below: Mapping[Partition, int]) -> None:
        self._key_of = key_of
        self._forgotten_below = forgotten_below

    async def claim(self, connection: Connection[Row], batch: Batch) -> Claims:
        """The records whose outputs were sent: each is the one, of all with its id, that was processed.

        A type without inbox has rows only for messages that failed: all others were processed.
        """
        records = batch.as_rows()
        keys = [record.key if _has_row(record) else self._key_of(record.id_of_its_own) for record in records]
        found = await known(connection, keys)
        claims = Claims()
        for index, (record, key) in enumerate(zip(records, keys, strict=True)):
            place = record.reading.partition_id, record.message.offset
            if key in found:
                sent = _has_row(record) and found[key] == place
            else:
                forgotten = record.message.offset < self._forgotten_below.get(record.partition, 0)
                sent = forgotten or not _has_row(record)
            if sent and not record.not_ours and record.failure is None:
                record.parked = False  # it was done before its key was parked
                claims.mine.append(index)
            else:
                record.not_ours = True  # also in a later try of the batch, or of a part of it
                claims.skip(PriorDelivery.NOT_OURS)
        return claims


def _has_row(record: Record) -> bool:
    """Whether the message was processed under its id in the inbox, whatever the record says now."""
    return record.redriven or record.message_type is None or record.message_type.in_inbox
