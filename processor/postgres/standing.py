"""Where a consumer stands, as far as Postgres knows: the statements of `processor status`. They only read.

None of them reads completed rows of the inbox, of which there may be millions: their number and their oldest are
estimates of the planner's statistics.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from processor.postgres.slots import LEASED, lease_class

if TYPE_CHECKING:
    from processor.postgres.session import Connection

PARTITIONS = f"""
    WITH leased AS MATERIALIZED ({LEASED})
    SELECT l.topic, l.partition, l.partition_id, l.former, l.epoch, l.topic_id, l.next_offset, l.owner, l.slot,
           l.updated_at, EXISTS (SELECT FROM leased WHERE leased.slot = l.slot) AS alive,
           coalesce((SELECT array_agg(u.next_offset ORDER BY u.next_offset) FROM unsent u
                     WHERE u.partition_id = l.partition_id), '{{}}') AS unsent
    FROM ledger l WHERE l.consumer = $2 ORDER BY l.topic, l.partition
"""  # noqa: S608 - our constants

TROUBLES = f"""
    WITH leased AS MATERIALIZED ({LEASED})
    SELECT t.topic, t.partition, t.kind, t.reason, t.since, t.epoch,
           EXISTS (SELECT FROM leased WHERE leased.pid = t.backend) AS alive
    FROM partition_trouble t WHERE t.consumer = $2
"""  # noqa: S608 - our constants

# The index inbox_unfinished has all of it.
UNFINISHED = """
    SELECT partition_id, status::text, count(*) AS rows, min(received_at) AS oldest FROM inbox
    WHERE partition_id = ANY ($1::integer[]) AND status <> 'completed' GROUP BY 1, 2
"""

# Of all consumers that share the table. It was never analysed: then the numbers are -1 and NULL.
ESTIMATE = """
    SELECT c.reltuples::bigint AS rows,
           (SELECT (s.histogram_bounds::text::timestamptz[])[1] FROM pg_stats s
            WHERE s.schemaname = n.nspname AND s.tablename = c.relname AND s.attname = 'received_at') AS oldest,
           (SELECT count(DISTINCT consumer) FROM ledger) AS consumers
    FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = 'inbox'::regclass
"""


class Standing(NamedTuple):
    """One partition in the ledger."""

    topic: str
    partition: int
    partition_id: int
    former: list[int]
    epoch: int
    topic_id: str
    position: int
    owner: str
    slot: int | None
    updated_at: datetime
    alive: bool  # the owner's slot is leased by a living process
    unsent: list[int]  # the ends of the batches of which outputs are stored


class Noted(NamedTuple):
    """Why a partition stands still, as a process has written it down."""

    topic: str
    partition: int
    kind: str
    reason: str
    since: datetime
    epoch: int
    alive: bool  # the process that wrote it lives


class Rows(NamedTuple):
    """Rows of the inbox that are not completed, of one partition and status."""

    partition_id: int
    status: str
    rows: int
    oldest: datetime


class Estimate(NamedTuple):
    """The inbox as a whole, by Postgres' statistics."""

    rows: int  # -1: never analysed
    oldest: datetime | None
    consumers: int  # that share it


async def partitions(connection: Connection, consumer: str) -> list[Standing]:
    return [Standing._make(row) for row in await connection.fetch(PARTITIONS, lease_class(consumer), consumer)]


async def troubles(connection: Connection, consumer: str) -> list[Noted]:
    return [Noted._make(row) for row in await connection.fetch(TROUBLES, lease_class(consumer), consumer)]


async def slots(connection: Connection, consumer: str) -> list[int]:
    """The slots that living processes have leased."""
    return sorted(row["slot"] for row in await connection.fetch(LEASED, lease_class(consumer)))


async def unfinished(connection: Connection, partition_ids: Iterable[int]) -> list[Rows]:
    return [Rows._make(row) for row in await connection.fetch(UNFINISHED, list(partition_ids))]


async def estimate(connection: Connection) -> Estimate:
    row = await connection.fetchrow(ESTIMATE)
    assert row is not None
    return Estimate._make(row)
