"""Keys whose messages wait behind one that failed, so that each key is processed in order or not at all.

A key is parked as long as the inbox has a row with its `parked_key`: the failed message, and those that came after it.
The engine remembers which keys these may be, so that any other key costs only a look into a set. A message that comes
again, sent by an operator or read again, runs if everything before it is done, and waits again if not.

A message has one row, in the partition where it was first seen. If it comes again in another partition, that place is
kept too. Messages cannot wait for each other in a circle: a message waits only for messages seen before it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.messages.batch import Batch
    from processor.messages.message import Partition
    from processor.messages.record import Record

LOAD = """
    SELECT partition_id, parked_key FROM inbox WHERE partition_id = ANY ($1::integer[]) AND parked_key IS NOT NULL
    UNION SELECT partition_id, parked_key FROM parked_repeats WHERE partition_id = ANY ($1::integer[])
"""

# Repeats of messages that are done have no effect any more; the next owner of the partition deletes them here, and
# so does each round of retention.
FORGET_REPEATS = """
    DELETE FROM parked_repeats r WHERE partition_id = ANY ($1::integer[])
    AND NOT EXISTS (SELECT FROM inbox i WHERE i.key = r.key AND i.parked_key IS NOT NULL)
"""

# Only the first place of a repeat counts.
REPEAT = """
    INSERT INTO parked_repeats (partition_id, parked_key, "offset", key)
    SELECT * FROM unnest($1::integer[], $2::bytea[], $3::bigint[], $4::uuid[])
             AS m(partition_id, parked_key, position, key)
    WHERE NOT EXISTS (
        SELECT FROM parked_repeats r
        WHERE r.partition_id = m.partition_id AND r.parked_key = m.parked_key AND r.key = m.key
    )
    ON CONFLICT DO NOTHING
"""

# The first `limit` unfinished messages of a key k in a partition, in order.
QUEUE = """
    (SELECT i.key, i."offset" FROM inbox i
     WHERE i.partition_id = k.partition_id AND i.parked_key = k.parked_key AND i.parked_key IS NOT NULL
     ORDER BY i."offset" LIMIT {limit})
    UNION ALL
    (SELECT r.key, r."offset" FROM parked_repeats r
     WHERE r.partition_id = k.partition_id AND r.parked_key = k.parked_key
       AND EXISTS (SELECT FROM inbox i WHERE i.key = r.key AND i.parked_key IS NOT NULL)
     ORDER BY r."offset" LIMIT {limit})
    ORDER BY 2 LIMIT {limit}
"""

UNFINISHED = f"""
    SELECT k.partition_id, k.parked_key, first.key
    FROM unnest($1::integer[], $2::bytea[]) AS k(partition_id, parked_key)
    CROSS JOIN LATERAL ({QUEUE.format(limit="$3")}) AS first
    ORDER BY k.partition_id, k.parked_key, first."offset"
"""  # noqa: S608 - a constant of ours

_failure, _parked = attrgetter("failure"), attrgetter("parked")


def digest(key: bytes) -> bytes:
    """Return the digest that stands for a key, which may be too long for an index; the same as `sha256` in SQL."""
    return hashlib.sha256(key).digest()


async def load(connection: Connection[Row], partition_ids: Sequence[int]) -> dict[int, set[bytes]]:
    """Return the digests of the parked keys of each partition."""
    found: dict[int, set[bytes]] = {partition_id: set() for partition_id in partition_ids}
    await forget_repeats(connection, partition_ids)
    for row in await connection.fetch(LOAD, list(partition_ids)):
        found[row["partition_id"]].add(row["parked_key"])
    return found


async def forget_repeats(connection: Connection[Row], partition_ids: Sequence[int]) -> None:
    """Delete the places of messages that are done."""
    await connection.execute(FORGET_REPEATS, list(partition_ids))


async def sort_out(
    connection: Connection[Row], batch: Batch, parked: Mapping[Partition, set[bytes]], *, park: bool
) -> None:
    """Mark the records that have to wait; with `park`, also behind those that fail in this same batch.

    `parked` has the keys of each partition that may be parked; those that are not any more are removed.
    """
    if any(map(_parked, batch.rows)):  # marked in an earlier try
        for record in batch.rows:
            record.parked = False
    if not any(parked.values()) and not (park and any(map(_failure, batch.rows))):
        return
    records = batch.as_rows()
    waiting: dict[tuple[int, bytes], deque[bytes]] = {}  # inbox keys of unfinished messages, by partition and key
    digests = {key: digest(key) for record in records if (key := record.message.key) is not None}
    asked = {
        (record.reading.partition_id, digests[record.message.key]): record.partition
        for record in records
        if record.message.key is not None and digests[record.message.key] in parked[record.partition]
    }
    if asked:
        places = [list(column) for column in zip(*asked, strict=True)]
        for row in await connection.fetch(UNFINISHED, *places, len(records) + 1):
            waiting.setdefault((row["partition_id"], row["parked_key"]), deque()).append(row["key"].bytes)
    for place, partition in asked.items():
        if place not in waiting:
            parked[partition].discard(place[1])
    for record in records:
        if record.message.key is None or record.not_ours:
            continue
        place = (record.reading.partition_id, digests[record.message.key])
        queue = waiting.get(place)
        if queue and queue[0] != record.key:
            # A collision fails whatever is before it: if it were parked, it would be processed later.
            record.parked = not (record.collided and record.failure is not None)
        elif record.failure is not None:
            if park and not queue:
                waiting[place] = deque([record.key])
        elif queue:
            queue.popleft()


async def repeat(connection: Connection[Row], records: Sequence[Record]) -> None:
    """Keep the places of messages whose rows are in another partition: others wait behind them here too."""
    places = [
        (record.reading.partition_id, digest(record.message.key), record.message.offset, record.key.hex())
        for record in records
        if record.message.key is not None
    ]
    if places:
        await connection.execute(REPEAT, *(list(column) for column in zip(*places, strict=True)))
