"""Failed and parked rows of the inbox, as an operator looks at them or gives them up.

Filters, and the statements that list, show, count and discard. Those that send messages again are in redrive.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias
from uuid import UUID

import orjson

from processor.messages import identity, wire
from processor.messages.message import Partition
from processor.postgres import parked_keys

if TYPE_CHECKING:
    from processor.postgres.session import Connection

STATUSES = ("failed", "parked", "discarded", "pending", "processing")
REPAIRABLE = ("failed", "parked")

# Rows are read in pages, without their payloads, so that Postgres sorts them once for many chunks.
PAGE_ROWS = 10_000
BEGINNING = (-1, UUID(int=0))

SOURCES = """
    SELECT s.partition_id, topic, partition FROM ledger, unnest(former || ledger.partition_id) AS s(partition_id)
    WHERE consumer = $1 AND ($2::text IS NULL OR topic = $2) AND ($3::integer IS NULL OR partition = $3)
    ORDER BY s.partition_id
"""

# `->>` fails on a text with \u0000 anywhere in it; json, unlike jsonb, can hold one, and errors do.
ERROR = r"""(CASE WHEN strpos(error::text, '\u0000') = 0 THEN error
             ELSE regexp_replace(error::text, '(?<!\\)((\\\\)*)\\u0000', '\1', 'g')::json END)"""
# A message whose id belongs to another payload. Sending everything again must not process it.
COLLIDED = f"(status = 'failed' AND coalesce({ERROR} ->> 'reason', '') = 'collision')"
_FAILED_AT = "coalesce(finished_at, first_failed_at, received_at)"
_UNWINDOWED = "CASE WHEN $12 THEN regexp_replace(message_id, '@[0-9]+$', '') ELSE message_id END"

# The first condition follows from the second, but Postgres uses the index inbox_unfinished only where it is written.
MATCHES = f"""
    status <> 'completed' AND status = ANY ($2::text[]::inbox_status[])
    AND ($3::uuid[] IS NULL OR key = ANY ($3))
    AND ($4::bytea IS NULL OR record_key = $4)
    AND ($5::text IS NULL OR type = $5)
    AND ($6::text IS NULL OR {ERROR} ->> 'class' = $6)
    AND ($7::text IS NULL OR {ERROR} ->> 'reason' = $7)
    AND ($8::timestamptz IS NULL OR {_FAILED_AT} >= $8)
    AND ($9::timestamptz IS NULL OR {_FAILED_AT} < $9)
"""

COUNT = f"SELECT count(*) FROM inbox WHERE partition_id = ANY ($1::integer[]) AND {MATCHES}"  # noqa: S608 - our constants

LIST = f"""
    SELECT key, partition_id, "offset", status::text, message_id, type, record_key, error::text, attempts, parked_key,
           received_at, first_failed_at, finished_at, redriven_at, octet_length(payload) AS bytes
    FROM inbox WHERE partition_id = ANY ($1::integer[]) AND {MATCHES}
    ORDER BY partition_id, "offset", key LIMIT $10
"""  # noqa: S608 - our constants

# The messages that an id may stand for. In the inbox it has its type before it ($11, message.scope_by_type) and its
# window behind it ($12, message.window_seconds); who looks for it may know neither.
NAMED = f"""
    SELECT DISTINCT given, message_id
    FROM inbox JOIN unnest($10::text[]) AS given
         ON given IN (message_id, {_UNWINDOWED})
         OR $11 AND coalesce(type, '') || ':' || given IN (message_id, {_UNWINDOWED})
    WHERE partition_id = ANY ($1::integer[]) AND {MATCHES} ORDER BY message_id
"""  # noqa: S608 - our constants

SHOW = """
    SELECT topic, partition, key, "offset", status::text, message_id, type, record_key, payload, headers::text,
           error::text, attempts, coalesce(inbox.unfinished, 0) AS unfinished, parked_key, timestamp_ms, received_at,
           first_failed_at, finished_at, redriven_at, lease_owner, lease_until, result::text, history::text
    FROM inbox JOIN ledger ON inbox.partition_id = ledger.partition_id OR inbox.partition_id = ANY (former)
    WHERE key = ANY ($1::uuid[]) AND consumer = $2
"""

_SIZE = (
    "coalesce(octet_length(payload), 0) + coalesce(octet_length(record_key), 0) + coalesce(pg_column_size(headers), 0)"
)
# The columns of `Brief`, in their order.
BRIEF = f'key, "offset", status::text, message_id, type, record_key, parked_key, {_SIZE} AS bytes'

PAGE_TO_DISCARD = f"""
    SELECT {BRIEF} FROM inbox
    WHERE partition_id = ANY ($1::integer[]) AND {MATCHES} AND ("offset", key) > ($10, $11)
    ORDER BY "offset", key LIMIT $12
"""  # noqa: S608 - our constants

DISCARD = """
    WITH locked AS (
        SELECT key FROM inbox WHERE key = ANY ($1::uuid[]) AND status IN ('failed', 'parked') ORDER BY key FOR UPDATE
    )
    UPDATE inbox
    SET status = 'discarded', parked_key = NULL, history = coalesce(inbox.history, '[]') || $2::jsonb
    FROM locked
    WHERE inbox.key = locked.key AND inbox.status IN ('failed', 'parked')
    RETURNING 1
"""

# Sent, and the service has advanced beyond the record without touching the row. Messages of a topic that was deleted
# are sent to the topic that has its name now, hence `former`.
PASSED_OVER = """coalesce(
    (SELECT next_offset FROM ledger WHERE ledger.partition_id = inbox.partition_id),
    (SELECT next_offset FROM ledger WHERE inbox.partition_id = ANY (former))
) > (
    SELECT max((event ->> 'offset')::bigint) FROM jsonb_array_elements(history) AS event
    WHERE event ->> 'event' = 'redriven'
)"""

HEADS = f"""
    SELECT k.partition_id, k.parked_key, head.*
    FROM unnest($1::integer[], $2::bytea[]) AS k(partition_id, parked_key)
    CROSS JOIN LATERAL (
        SELECT inbox.key, inbox.partition_id AS home, status::text, message_id, redriven_at,
               inbox.xmin::text AS version,
               {PASSED_OVER} AS passed_over, {COLLIDED} AS collided
        FROM ({parked_keys.QUEUE.format(limit=1)}) AS first JOIN inbox ON inbox.key = first.key
    ) AS head
"""  # noqa: S608 - our constants

# A parked key of one partition, by the partition's partition_id.
ParkedKey: TypeAlias = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages; a field that is not given matches all."""

    ids: tuple[str, ...] = ()
    key: bytes | None = None
    type: str | None = None
    error_class: str | None = None
    reason: str | None = None
    topic: str | None = None
    partition: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    statuses: tuple[str, ...] = REPAIRABLE
    despite_collision: bool = False  # process collisions among `ids`, each as a message of its own

    def is_given(self) -> bool:
        return replace(self, statuses=REPAIRABLE) != Filter()

    def arguments(self, consumer: str, partition_ids: Iterable[int]) -> list[Any]:
        """$1 to $9 of the statements."""
        matched = [self.type, self.error_class, self.reason, self.since, self.until]
        return [list(partition_ids), list(self.statuses), self._keys(consumer) or None, self.key, *matched]

    def allowed(self, consumer: str) -> list[str]:
        """Inbox keys of collisions that may be sent."""
        return self._keys(consumer) if self.despite_collision else []

    def _keys(self, consumer: str) -> list[str]:
        key_of = identity.inbox_key(consumer)
        return [key_of(id_).hex() for id_ in self.ids]


class Brief(NamedTuple):
    """A row without its payload and headers."""

    key: UUID
    offset: int
    status: str
    message_id: str
    type: str | None
    record_key: bytes | None
    parked_key: bytes | None
    bytes: int


class Head(NamedTuple):
    """The message that a parked key waits for."""

    key: UUID
    home: int  # the partition_id that has its row
    status: str
    message_id: str
    redriven_at: datetime | None
    version: str
    passed_over: bool | None
    collided: bool


async def partitions(connection: Connection, consumer: str, wanted: Filter) -> dict[int, Partition]:
    """The partitions that the filter leaves, by partition_id; a partition whose topic was recreated has several."""
    rows = await connection.fetch(SOURCES, consumer, wanted.topic, wanted.partition)
    return {row["partition_id"]: Partition(row["topic"], row["partition"]) for row in rows}


async def count(connection: Connection, consumer: str, wanted: Filter, partition_ids: Iterable[int]) -> int:
    found: int = await connection.fetchval(COUNT, *wanted.arguments(consumer, partition_ids))
    return found


async def first(
    connection: Connection, consumer: str, wanted: Filter, partition_ids: Iterable[int], limit: int
) -> list[dict[str, Any]]:
    """The first rows that match, by partition and offset, their errors decoded."""
    rows = await connection.fetch(LIST, *wanted.arguments(consumer, partition_ids), limit)
    return [dict(row) | {"error": wire.load_error(row["error"])} for row in rows]


async def find(connection: Connection, consumer: str, message_ids: Iterable[str]) -> dict[str, dict[str, Any]]:
    """All columns of these rows by message id, whatever their status, with every JSON column decoded."""
    key_of = identity.inbox_key(consumer)
    ids = {UUID(bytes=key_of(id_)): id_ for id_ in message_ids}
    return {
        ids[row["key"]]: dict(row)
        | {
            "message_id": ids[row["key"]],
            "headers": None if row["headers"] is None else wire.load_headers(row["headers"]),
            "error": wire.load_error(row["error"]),
            "result": orjson.loads(row["result"]) if row["result"] else None,
            "history": orjson.loads(row["history"] or "[]"),
        }
        for row in await connection.fetch(SHOW, list(ids), consumer)
    }


async def named(
    connection: Connection, consumer: str, wanted: Filter, partition_ids: Iterable[int], *, scoped: bool, windowed: bool
) -> dict[str, list[str]]:
    """For each id of the filter, the ids in the inbox that it may stand for, among the messages that match the rest."""
    found: dict[str, list[str]] = {id_: [] for id_ in wanted.ids}
    arguments = replace(wanted, ids=()).arguments(consumer, partition_ids)
    for given, id_ in await connection.fetch(NAMED, *arguments, list(found), scoped, windowed):
        found[given].append(id_)
    return found


async def pages(connection: Connection, statement: str, arguments: Sequence[Any]) -> AsyncIterator[list[Brief]]:
    """Ordered by (offset, key), so no row comes twice."""
    after: tuple[int, UUID] = BEGINNING
    while page := [Brief._make(row) for row in await connection.fetch(statement, *arguments, *after, PAGE_ROWS)]:
        yield page
        after = page[-1].offset, page[-1].key


def to_discard(connection: Connection, consumer: str, wanted: Filter, partition_id: int) -> AsyncIterator[list[Brief]]:
    return pages(connection, PAGE_TO_DISCARD, wanted.arguments(consumer, [partition_id]))


async def discard(connection: Connection, keys: Sequence[UUID], by: str, reason: str) -> int:
    """Give these up if they are still failed or parked; returns how many were."""
    event = history_event({"event": "discarded", "by": by, "reason": reason}, datetime.now(UTC))
    return len(await connection.fetch(DISCARD, keys, event))


async def heads(connection: Connection, keys: Iterable[ParkedKey]) -> dict[ParkedKey, Head]:
    """What each of these keys waits for; a key that is free is absent."""
    places = list(keys)
    rows = await connection.fetch(HEADS, [partition_id for partition_id, _ in places], [key for _, key in places])
    return {(partition_id, key): Head(*head) for partition_id, key, *head in rows}


def history_event(event: dict[str, Any], at: datetime) -> str:
    return orjson.dumps({"at": at.isoformat(timespec="milliseconds"), **event}).decode()
