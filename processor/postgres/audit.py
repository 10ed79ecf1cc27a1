"""What an audit asks the inbox and the ledger. It changes nothing, and compares in Postgres: only what is not as it
should plainly be comes back.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, NamedTuple

from processor.messages.message import Partition
from processor.postgres import retention

if TYPE_CHECKING:
    from processor.postgres.session import Connection

LEDGER = """
    SELECT topic, partition, topic_id, partition_id, first_offset, next_offset, former <> '{}' AS recreated FROM ledger
    WHERE consumer = $1 AND topic = ANY ($2::text[])
"""

# ANY repeats the join's condition: it makes the planner use the index whatever the table's size.
NOT_PLAINLY_DONE = """
    SELECT m.n::integer - 1 AS number, i.status::text, i.partition_id = $4 AND i."offset" = m.position AS same_place,
           i.payload_hash = m.hash AS same_payload, i.history IS NOT NULL OR i.parked_key IS NOT NULL AS failed_before
    FROM unnest($1::uuid[], $2::bigint[], $3::integer[]) WITH ORDINALITY AS m(key, position, hash, n)
    LEFT JOIN inbox i ON i.key = m.key AND i.key = ANY ($1::uuid[])
    WHERE (i.status = 'completed' AND i.partition_id = $4 AND i."offset" = m.position AND i.payload_hash = m.hash)
          IS NOT TRUE
    ORDER BY m.n
"""

NOT_COMPLETED = """
    SELECT m.n::integer - 1 AS number, i.status::text
    FROM unnest($1::uuid[]) WITH ORDINALITY AS m(key, n)
    LEFT JOIN inbox i ON i.key = m.key AND i.key = ANY ($1::uuid[])
    WHERE i.status IS DISTINCT FROM 'completed'
    ORDER BY m.n
"""

# A running owner publishes what it has committed, and commits nothing more while it cannot.
OWED = """
    SELECT topic, partition, u.next_offset
    FROM ledger l JOIN unsent u ON u.partition_id = l.partition_id
    WHERE l.consumer = $1 AND topic = ANY ($2::text[]) AND l.updated_at < now() - $3::interval
    ORDER BY topic, partition, u.next_offset
"""


class LedgerEntry(NamedTuple):
    """How far the work on a partition is committed."""

    topic_id: str
    partition_id: int
    first_offset: int
    next_offset: int
    recreated: bool  # the inbox also has messages of an earlier topic of this name


class Odd(NamedTuple):
    """What the inbox has about a record that was not plainly completed when it came the first time."""

    number: int  # among those asked about, from 0
    status: str | None  # None: no row
    same_place: bool | None
    same_payload: bool | None
    failed_before: bool | None


class Owed(NamedTuple):
    """Outputs of a batch that were stored long ago, and still are."""

    partition: Partition
    next_offset: int  # of the batch


async def ledger(connection: Connection, consumer: str, topics: Sequence[str]) -> dict[Partition, LedgerEntry]:
    rows = await connection.fetch(LEDGER, consumer, list(topics))
    return {
        Partition(row["topic"], row["partition"]): LedgerEntry(*(row[name] for name in LedgerEntry._fields))
        for row in rows
    }


async def not_plainly_done(
    connection: Connection, partition_id: int, keys: list[str], offsets: list[int], hashes: list[int]
) -> list[Odd]:
    """Those of the records of one partition that have no completed row with their own coordinates and payload."""
    return list(map(Odd._make, await connection.fetch(NOT_PLAINLY_DONE, keys, offsets, hashes, partition_id)))


async def not_completed(connection: Connection, keys: list[str]) -> list[tuple[int, str | None]]:
    """Those of the messages that have no completed row: their number, and the status of the row that they have."""
    return [(row["number"], row["status"]) for row in await connection.fetch(NOT_COMPLETED, keys)]


async def owed(connection: Connection, consumer: str, topics: Sequence[str], seconds: float) -> list[Owed]:
    """Stored outputs of partitions on which nothing has been committed for so long."""
    rows = await connection.fetch(OWED, consumer, list(topics), timedelta(seconds=seconds))
    return [Owed(Partition(row["topic"], row["partition"]), row["next_offset"]) for row in rows]


async def forgotten(connection: Connection, consumer: str) -> dict[Partition, int]:
    """The offset of each partition below which rows may have been deleted for their age."""
    return {at: mark.below for at, mark in (await retention.watermarks(connection, consumer)).items()}
