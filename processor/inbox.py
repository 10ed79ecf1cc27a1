"""One row per message and consumer; its primary key decides who does a message, and that it is done once.

All inbox SQL is here. A claim inserts rows as `completed` at once: they become visible only with
the commit that makes it true. Nothing checks first and acts later.

Ids are always locked in sorted order, and before any row of a handler, so that two processes
that claim the same messages wait for each other in one direction only.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import orjson

from processor.records import Failure, Headers, Record

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

# Waits while another transaction holds one of the ids: the unique index is the lock.
CLAIM = """
    INSERT INTO inbox (consumer, message_id, topic, partition, "offset", type, payload_hash, status)
    SELECT $1, m.id, m.topic, m.partition, m.position, m.type, m.hash, 'completed'
    FROM unnest($2::text[], $3::text[], $4::integer[], $5::bigint[], $6::text[], $7::bytea[])
         AS m(id, topic, partition, position, type, hash)
    ORDER BY m.id
    ON CONFLICT DO NOTHING
    RETURNING message_id
"""

# A new statement, so that READ COMMITTED shows the row the insert lost to.
LOOK_UP = """
    SELECT message_id, topic, partition, "offset", payload_hash, status::text, attempts
    FROM inbox WHERE consumer = $1 AND message_id = ANY ($2::text[])
"""

TAKE_OVER = """
    WITH taken AS (
        SELECT message_id FROM inbox
        WHERE consumer = $1 AND message_id = ANY ($2::text[]) AND status IN ('failed', 'pending')
        ORDER BY message_id FOR UPDATE
    )
    UPDATE inbox SET status = 'completed', attempts = attempts + 1, finished_at = now(), payload_hash = m.hash,
           type = m.type, error = NULL, key = NULL, payload = NULL, headers = NULL
    FROM taken JOIN unnest($2::text[], $3::text[], $4::bytea[]) AS m(id, type, hash) ON m.id = taken.message_id
    WHERE inbox.consumer = $1 AND inbox.message_id = taken.message_id
    RETURNING inbox.message_id, inbox.attempts
"""

FAIL = """
    INSERT INTO inbox (consumer, message_id, topic, partition, "offset", type, payload_hash, status,
                       finished_at, error, key, payload, headers)
    SELECT $1, m.id, m.topic, m.partition, m.position, m.type, m.hash, 'failed', now(), m.error, m.key, m.payload,
           m.headers
    FROM unnest($2::text[], $3::text[], $4::integer[], $5::bigint[], $6::text[], $7::bytea[],
                $8::json[], $9::bytea[], $10::bytea[], $11::json[])
         AS m(id, topic, partition, position, type, hash, error, key, payload, headers)
    ORDER BY m.id
    ON CONFLICT (consumer, message_id) DO UPDATE
    SET status = 'failed', finished_at = now(), error = excluded.error, key = excluded.key,
        payload = excluded.payload, headers = excluded.headers,
        -- rows of this transaction stand as completed, their attempt already counted
        attempts = inbox.attempts + (inbox.status = 'failed')::integer
"""

KEEP_RESULTS = """
    UPDATE inbox SET result = m.result
    FROM unnest($2::text[], $3::json[]) AS m(id, result)
    -- ANY, though the join says it already: it makes the planner use the index whatever the table's size
    WHERE inbox.consumer = $1 AND inbox.message_id = m.id AND inbox.message_id = ANY ($2::text[])
"""


class Verdict(Enum):
    """What an earlier delivery means for this one."""

    REDELIVERY = "redelivery"  # done, at these coordinates
    DUPLICATE = "duplicate"  # done, at other coordinates
    COLLISION = "collision"  # another payload has this id
    FAILED_BEFORE = "failed_before"  # nothing of it is cached: try again
    BUSY = "busy"  # someone else is at it


@dataclass(slots=True)
class Claims:
    """The outcome of one claim: whose handler runs, and why the others' do not."""

    mine: set[int] = field(default_factory=set)  # by index in the batch
    repeated: set[int] = field(default_factory=set)  # those that come again later in the same batch
    cut_at: int | None = None  # the batch cannot go beyond this record, and nothing was claimed
    skipped: dict[Verdict, int] = field(default_factory=dict)
    collisions: list[Record] = field(default_factory=list)

    def skip(self, verdict: Verdict) -> None:
        self.skipped[verdict] = self.skipped.get(verdict, 0) + 1


class BusyElsewhere(Exception):
    """A message is being processed by someone else under a live lease: come back later."""


class Inbox:
    def __init__(self, consumer: str, on_collision: str) -> None:
        self._consumer = consumer
        self._on_collision = on_collision

    async def claim(self, connection: Connection[Row], records: Sequence[Record]) -> Claims:
        """Decide for each record whether it is ours to do; those that failed to decode are claimed like any other."""
        claims = Claims()
        by_id: dict[str, int] = {}
        colliding: list[int] = []
        for index, record in enumerate(records):
            if _without_inbox(record):
                claims.mine.add(index)
                continue
            if record.collided:
                colliding.append(index)
                continue
            earlier = by_id.setdefault(record.message.id, index)
            if earlier == index:
                continue
            if records[earlier].failure is not None:
                # Failed already, and what failed is never cached: the batch has to end before this one.
                claims.cut_at = index
                return claims
            if records[earlier].payload_hash == record.payload_hash:
                claims.skip(Verdict.DUPLICATE)
                claims.repeated.add(earlier)
            else:
                colliding.append(index)
        won = await self._insert(connection, [records[index] for index in by_id.values()])
        claims.mine.update(by_id[message_id] for message_id in won)
        if len(won) < len(by_id):
            lost = {id_: index for id_, index in by_id.items() if id_ not in won}
            colliding += await self._settle(connection, records, lost, claims)
        if colliding:
            await self._claim_collisions(connection, records, colliding, claims)
        return claims

    async def fail(self, connection: Connection[Row], failed: Sequence[Record]) -> None:
        """Keep the evidence. The rows of the same batch that were claimed as completed turn to failed."""
        if not failed:
            return
        failures = [record.failure or Failure("unknown", "") for record in failed]
        await connection.execute(
            FAIL,
            *_columns(self._consumer, failed, [_row_id(record) for record in failed]),
            [_error(failure) for failure in failures],
            [record.message.key for record in failed],
            [record.payload for record in failed],
            [_headers(record.message.headers) for record in failed],
        )

    async def keep_results(self, connection: Connection[Row], results: Sequence[tuple[Record, str]]) -> None:
        if results:
            await connection.execute(
                KEEP_RESULTS,
                self._consumer,
                [record.message.id for record, _ in results],
                [result for _, result in results],
            )

    async def _insert(self, connection: Connection[Row], records: Sequence[Record]) -> set[str]:
        if not records:
            return set()
        return {row[0] for row in await connection.fetch(CLAIM, *_columns(self._consumer, records))}

    async def _settle(
        self, connection: Connection[Row], records: Sequence[Record], lost: dict[str, int], claims: Claims
    ) -> list[int]:
        """Read what is there under ids we did not get; returns the indices that collide."""
        colliding: list[int] = []
        to_take: dict[str, int] = {}
        rows = await connection.fetch(LOOK_UP, self._consumer, list(lost))
        if len(rows) < len(lost):
            raise BusyElsewhere(next(id_ for id_ in lost if id_ not in {row["message_id"] for row in rows}))
        for row in rows:
            index = lost[row["message_id"]]
            match _judge(records[index], row):
                case Verdict.FAILED_BEFORE:
                    to_take[row["message_id"]] = index
                case Verdict.COLLISION:
                    colliding.append(index)
                case Verdict.BUSY:
                    raise BusyElsewhere(row["message_id"])
                case verdict:
                    claims.skip(verdict)
        if to_take:
            rows = await connection.fetch(
                TAKE_OVER,
                self._consumer,
                list(to_take),
                [records[index].message.type for index in to_take.values()],
                [records[index].payload_hash for index in to_take.values()],
            )
            if len(rows) < len(to_take):
                raise BusyElsewhere(next(id_ for id_ in to_take if id_ not in {row["message_id"] for row in rows}))
            for row in rows:
                index = to_take[row["message_id"]]
                records[index].message.attempt = row["attempts"]
                claims.mine.add(index)
        return colliding

    async def _claim_collisions(
        self, connection: Connection[Row], records: Sequence[Record], colliding: list[int], claims: Claims
    ) -> None:
        """Same id, other payload: by policy. Failed or processed, it gets a row of its own under id and coordinates."""
        claims.collisions = [records[index] for index in colliding]
        if self._on_collision == "skip":
            return
        by_id = {}
        for index in colliding:
            record = records[index]
            if not record.collided:  # or else an earlier try of this batch has done this already
                record.collided = True
                if self._on_collision == "fail":
                    record.failure = Failure("collision", f"{record.message.id!r} is the id of another payload")
                record.message.id = f"{record.message.id}~{record.coordinates}"
            by_id[record.message.id] = index
        won = await self._insert(connection, [records[index] for index in colliding])
        claims.mine.update(by_id[message_id] for message_id in won)
        lost = {id_: index for id_, index in by_id.items() if id_ not in won}
        if lost:
            await self._settle(connection, records, lost, claims)


def _judge(record: Record, row: Row) -> Verdict:
    message = record.message
    if row["status"] in ("failed", "pending"):
        return Verdict.FAILED_BEFORE
    if row["status"] == "processing":
        return Verdict.BUSY
    if (row["topic"], row["partition"], row["offset"]) == (message.topic, message.partition, message.offset):
        return Verdict.REDELIVERY
    if row["payload_hash"] != record.payload_hash:
        return Verdict.COLLISION
    return Verdict.DUPLICATE


def _without_inbox(record: Record) -> bool:
    return record.route is not None and not record.route.inbox


def _row_id(record: Record) -> str:
    """Where a failure is kept. A type without inbox must not touch the row of a message that has one."""
    return f"{record.message.id}~{record.coordinates}" if _without_inbox(record) else record.message.id


def _columns(consumer: str, records: Sequence[Record], ids: Sequence[str] | None = None) -> tuple[Any, ...]:
    messages = [record.message for record in records]
    return (
        consumer,
        ids or [message.id for message in messages],
        [message.topic for message in messages],
        [message.partition for message in messages],
        [message.offset for message in messages],
        [message.type for message in messages],
        [record.payload_hash for record in records],
    )


def _error(failure: Failure) -> str:
    text = orjson.dumps(
        {"reason": failure.reason, "message": failure.detail, "traceback": failure.traceback},
        default=str,
    )
    return text.decode()


def _headers(headers: Headers) -> str:
    """Text where it is text, base64 where it is not; nothing is lost either way."""
    return orjson.dumps([[name, _header_value(value)] for name, value in headers]).decode()


def _header_value(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}
