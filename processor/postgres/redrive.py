"""The statements that send failed and parked messages again: which are sent, marking them, what became of them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import UUID

from processor.messages import wire
from processor.messages.message import Partition
from processor.postgres.dead_letters import BRIEF, COLLIDED, MATCHES, PASSED_OVER, Brief, Filter, history_event, pages

if TYPE_CHECKING:
    from processor.postgres.session import Connection

# Parked rows count even if they were sent: their key is not free yet.
SCOPE = f"""
    SELECT count(*) AS matched, max("offset") FILTER (WHERE parked_key IS NULL) AS last,
           coalesce(array_agg(DISTINCT parked_key) FILTER (WHERE parked_key IS NOT NULL), '{{}}') AS keys
    FROM (
        SELECT "offset", parked_key FROM inbox
        WHERE partition_id = ANY ($1::integer[]) AND {MATCHES} AND (NOT {COLLIDED} OR key = ANY ($10::uuid[]))
              AND (parked_key IS NOT NULL OR redriven_at IS NULL OR $11)
        ORDER BY "offset", key LIMIT $12
    ) AS matched
"""  # noqa: S608 - our constants

SENT_BEFORE = f"""
    SELECT count(*) FROM inbox
    WHERE partition_id = ANY ($1::integer[]) AND {MATCHES} AND parked_key IS NULL AND redriven_at IS NOT NULL
"""  # noqa: S608 - our constants

COLLISIONS = f"""
    SELECT count(*) FROM inbox
    WHERE partition_id = ANY ($1::integer[]) AND {MATCHES} AND {COLLIDED} AND NOT key = ANY ($10::uuid[])
"""  # noqa: S608 - our constants

# The rows that match; of a parked key, all rows, whether they match or not.
_TO_SEND = f"""
    FROM inbox
    WHERE partition_id = ANY ($1::integer[]) AND status <> 'completed' AND status IN ('failed', 'parked')
      AND (NOT {COLLIDED} OR key = ANY ($10::uuid[]))
      AND CASE WHEN parked_key IS NULL THEN "offset" <= $12 AND (redriven_at IS NULL OR $11) AND {MATCHES}
               ELSE parked_key = ANY ($13::bytea[]) AND (redriven_at IS NULL OR $11 OR {PASSED_OVER}) END
"""
COUNT_TO_SEND = f"SELECT count(*) {_TO_SEND}"
PAGE_TO_SEND = f"""
    SELECT {BRIEF} {_TO_SEND} AND ("offset", key) > ($14, $15) ORDER BY "offset", key LIMIT $16
"""

PAGE_OF_KEYS = f"""
    SELECT {BRIEF} FROM inbox
    WHERE partition_id = $1 AND parked_key = ANY ($2::bytea[]) AND parked_key IS NOT NULL
      AND status IN ('failed', 'parked') AND (NOT {COLLIDED} OR key = ANY ($3::uuid[]))
      AND (redriven_at IS NULL OR $4 AND {PASSED_OVER}) AND ("offset", key) > ($5, $6)
    ORDER BY "offset", key LIMIT $7
"""  # noqa: S608 - our constants

# The row's version shows later whether the service was faster than the delivery report.
LOAD = """
    SELECT key, xmin::text AS version, message_id, record_key, payload, headers::text FROM inbox
    WHERE key = ANY ($1::uuid[]) AND status IN ('failed', 'parked') ORDER BY "offset", key
"""

# Locks in the order of the engine. A row that the service has touched since it was loaded no longer waits to be taken.
MARK = """
    WITH locked AS (SELECT key FROM inbox WHERE key = ANY ($1::uuid[]) ORDER BY key FOR UPDATE)
    UPDATE inbox
    SET redriven_at = CASE WHEN inbox.xmin::text = m.version THEN now() ELSE inbox.redriven_at END,
        history = coalesce(inbox.history, '[]') || m.event
    FROM locked JOIN unnest($1::uuid[], $2::text[], $3::jsonb[]) AS m(key, version, event) ON m.key = locked.key
    WHERE inbox.key = locked.key
"""

STATES = f"""
    SELECT key, xmin::text AS version, status::text, message_id, redriven_at, {PASSED_OVER} AS passed_over
    FROM inbox WHERE key = ANY ($1::uuid[])
"""  # noqa: S608 - our constants
POSITIONS = """
    SELECT partition_id, next_offset FROM ledger
    WHERE partition_id = ANY ($1::integer[]) OR former && $1::integer[] ORDER BY partition_id
"""


@dataclass(frozen=True, slots=True)
class Scope:
    """What a redrive sends of one partition."""

    partition_id: int
    partition: Partition
    matched: int  # rows that the filter matches
    keys: list[bytes]  # parked keys among them, of which everything is sent
    total: int  # rows to send
    arguments: list[Any]


class Kept(NamedTuple):
    """A record as it came."""

    key: UUID  # in the inbox
    version: str
    message_id: str
    record_key: bytes | None
    payload: bytes | None
    headers: list[tuple[str, bytes | None]]


class State(NamedTuple):
    """What has become of a message that was sent."""

    key: UUID
    version: str
    status: str
    message_id: str
    redriven_at: datetime | None
    passed_over: bool | None


async def scope(
    connection: Connection,
    consumer: str,
    wanted: Filter,
    partition_id: int,
    partition: Partition,
    *,
    again: bool,
    limit: int | None,
) -> Scope:
    """`limit` counts matches; a parked key is taken as a whole."""
    arguments = wanted.arguments(consumer, [partition_id])
    allowed = wanted.allowed(consumer)
    found = await connection.fetchrow(SCOPE, *arguments, allowed, again, limit)
    assert found is not None
    arguments += [allowed, again, -1 if found["last"] is None else found["last"], found["keys"]]
    total = await connection.fetchval(COUNT_TO_SEND, *arguments)
    return Scope(partition_id, partition, found["matched"], found["keys"], total, arguments)


async def sent_before(connection: Connection, consumer: str, wanted: Filter, partition_ids: Iterable[int]) -> int:
    """How many of the matching messages were sent and are not processed yet."""
    found: int = await connection.fetchval(SENT_BEFORE, *wanted.arguments(consumer, partition_ids))
    return found


async def collisions(connection: Connection, consumer: str, wanted: Filter, partition_ids: Iterable[int]) -> int:
    """How many of the matching messages a redrive leaves alone."""
    arguments = [*wanted.arguments(consumer, partition_ids), wanted.allowed(consumer)]
    found: int = await connection.fetchval(COLLISIONS, *arguments)
    return found


def to_send(connection: Connection, scope: Scope) -> AsyncIterator[list[Brief]]:
    return pages(connection, PAGE_TO_SEND, scope.arguments)


def of_keys(
    connection: Connection, partition_id: int, keys: Sequence[bytes], allowed: Sequence[str], *, passed_over: bool
) -> AsyncIterator[list[Brief]]:
    """What is to be sent of these parked keys; with `passed_over` also what was sent before its turn had come."""
    return pages(connection, PAGE_OF_KEYS, [partition_id, keys, allowed, passed_over])


async def load(connection: Connection, keys: Sequence[UUID]) -> list[Kept]:
    """Those of the messages that are still failed or parked, in order, with their bytes."""
    rows = await connection.fetch(LOAD, keys)
    return [
        Kept(key, version, message_id, record_key, payload, wire.load_headers(headers))
        for key, version, message_id, record_key, payload, headers in rows
    ]


async def mark(
    connection: Connection, sent: Sequence[Kept], offsets: Mapping[UUID, int], by: str, sent_at: datetime
) -> None:
    """Record that these are in Kafka, each at its offset."""
    events = [history_event({"event": "redriven", "by": by, "offset": offsets[kept.key]}, sent_at) for kept in sent]
    await connection.execute(MARK, [kept.key for kept in sent], [kept.version for kept in sent], events)


async def states(connection: Connection, keys: Sequence[UUID]) -> dict[UUID, State]:
    return {row["key"]: State._make(row) for row in await connection.fetch(STATES, keys)}


async def positions(connection: Connection, partition_ids: Iterable[int]) -> list[tuple[int, int]]:
    """How far the service is in these partitions."""
    return [(partition_id, offset) for partition_id, offset in await connection.fetch(POSITIONS, list(partition_ids))]
