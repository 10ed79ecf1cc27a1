"""Why partitions stand still, as their owners have written it down: the SQL of the table partition_trouble.

A row says the truth only while its writer lives and nobody has taken the partition over since. `standing.py` judges
that. A process writes no row over that of a newer owner, and deletes none of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.messages.message import Partition

# A process that has not got as far as an epoch of its own writes that of the owner before it: a newer one shows that
# somebody else was faster.
WRITE = """
    INSERT INTO partition_trouble AS t (consumer, topic, partition, kind, reason, since, epoch, backend)
    SELECT $1, p.topic, p.partition, p.kind, p.reason, p.since, greatest(p.epoch, coalesce(l.epoch, 0)), $7
    FROM unnest($2::text[], $3::integer[], $4::text[], $5::text[], $6::timestamptz[], $8::bigint[])
         AS p(topic, partition, kind, reason, since, epoch)
    LEFT JOIN ledger l ON l.consumer = $1 AND l.topic = p.topic AND l.partition = p.partition
    WHERE p.epoch = 0 OR l.epoch IS NULL OR l.epoch <= p.epoch
    ORDER BY p.topic, p.partition
    ON CONFLICT (consumer, topic, partition) DO UPDATE
    SET kind = excluded.kind, reason = excluded.reason, since = excluded.since, epoch = excluded.epoch,
        backend = excluded.backend
    WHERE t.epoch <= excluded.epoch
"""

# An owner clears what it wrote itself, and what was left by those before it.
CLEAR = """
    DELETE FROM partition_trouble t
    USING unnest($2::text[], $3::integer[], $5::bigint[]) AS p(topic, partition, epoch)
    WHERE t.consumer = $1 AND t.topic = p.topic AND t.partition = p.partition
      AND (t.backend = $4 OR t.epoch < p.epoch)
"""


class Trouble(NamedTuple):
    """Why a partition stands still."""

    kind: str
    reason: str
    since: datetime


async def write(
    connection: Connection[Row],
    consumer: str,
    backend: int,
    troubles: Sequence[tuple[Partition, int, Trouble]],
) -> None:
    """Write down the trouble of each partition, under the epoch of its owner."""
    await connection.execute(
        WRITE,
        consumer,
        [partition.topic for partition, _, _ in troubles],
        [partition.number for partition, _, _ in troubles],
        [trouble.kind for _, _, trouble in troubles],
        [trouble.reason for _, _, trouble in troubles],
        [trouble.since for _, _, trouble in troubles],
        backend,
        [epoch for _, epoch, _ in troubles],
    )


async def clear(
    connection: Connection[Row], consumer: str, backend: int, partitions: Sequence[tuple[Partition, int]]
) -> None:
    """Take back what was written about these partitions, by us or by an owner before us."""
    await connection.execute(
        CLEAR,
        consumer,
        [partition.topic for partition, _ in partitions],
        [partition.number for partition, _ in partitions],
        backend,
        [epoch for _, epoch in partitions],
    )
