"""One row per message and consumer; its primary key decides who does a message, and that it is done once.

All inbox SQL is here. A claim inserts rows as `completed` at once: they become visible only with
the commit that makes it true. Nothing checks first and acts later.

Keys are always locked in sorted order, and before any row of a handler, so that two processes
that claim the same messages wait for each other in one direction only.
"""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from operator import attrgetter
from struct import Struct
from typing import TYPE_CHECKING, Any

import orjson

from processor import postgres
from processor.records import Failure, Headers, Record

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

# The claim is the first thing that is done in a transaction; it can be taken back to here by itself.
SAVEPOINT = "SAVEPOINT claim"
TAKE_BACK = "ROLLBACK TO SAVEPOINT claim"

# Waits while another transaction holds one of the keys: the unique index is the lock. Gives those we did not get.
CLAIM = """
    WITH won AS (
        INSERT INTO inbox (key, source, "offset", payload_hash)
        SELECT m.key, m.source, m.position, m.hash
        FROM unnest($1::uuid[], $2::integer[], $3::bigint[], $4::integer[]) AS m(key, source, position, hash)
        ORDER BY m.key
        ON CONFLICT DO NOTHING
        RETURNING key
    )
    SELECT m.key FROM unnest($1::uuid[]) AS m(key) WHERE NOT EXISTS (SELECT FROM won WHERE won.key = m.key)
"""

# The columns of the same rows for COPY, which takes half the time but fails if a single key is known.
COPIED = ("key", "source", "offset", "payload_hash")
_copied = Struct("!h i16s ii iq ii").pack
_COPY_BEGIN = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END = b"\xff\xff"
# For fewer records the second round trip of a COPY costs more than it saves.
COPY_FROM = 100
# After a known key, so many batches without one are seen before the next COPY is tried.
CLEAN_BATCHES = 16

# A new statement, so that READ COMMITTED shows the row the insert lost to.
LOOK_UP = """
    SELECT key, source, "offset", payload_hash, status::text, attempts
    FROM inbox WHERE key = ANY ($1::uuid[])
"""

TAKE_OVER = """
    WITH taken AS (
        SELECT key FROM inbox WHERE key = ANY ($1::uuid[]) AND status IN ('failed', 'pending')
        ORDER BY key FOR UPDATE
    )
    UPDATE inbox SET status = 'completed', attempts = attempts + 1, finished_at = now(), payload_hash = m.hash,
           type = m.type, error = NULL, record_key = NULL, payload = NULL, headers = NULL
    FROM taken JOIN unnest($1::uuid[], $2::text[], $3::integer[]) AS m(key, type, hash) ON m.key = taken.key
    WHERE inbox.key = taken.key
    RETURNING inbox.key, inbox.attempts
"""

FAIL = """
    INSERT INTO inbox (key, source, "offset", payload_hash, status, message_id, type,
                       finished_at, error, record_key, payload, headers)
    SELECT m.key, m.source, m.position, m.hash, 'failed', m.id, m.type, now(), m.error, m.record_key, m.payload,
           m.headers
    FROM unnest($1::uuid[], $2::integer[], $3::bigint[], $4::integer[], $5::text[], $6::text[],
                $7::json[], $8::bytea[], $9::bytea[], $10::json[])
         AS m(key, source, position, hash, id, type, error, record_key, payload, headers)
    ORDER BY m.key
    ON CONFLICT (key) DO UPDATE
    SET status = 'failed', finished_at = now(), message_id = excluded.message_id, type = excluded.type,
        error = excluded.error, record_key = excluded.record_key, payload = excluded.payload,
        headers = excluded.headers,
        -- rows of this transaction stand as completed, their attempt already counted
        attempts = inbox.attempts + (inbox.status = 'failed')::integer
"""

KEEP_RESULTS = """
    UPDATE inbox SET result = m.result, message_id = m.id
    FROM unnest($1::uuid[], $2::text[], $3::json[]) AS m(key, id, result)
    -- ANY, though the join says it already: it makes the planner use the index whatever the table's size
    WHERE inbox.key = m.key AND inbox.key = ANY ($1::uuid[])
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

    mine: list[int] = field(default_factory=list)  # by index in the batch, in order
    repeated: set[int] = field(default_factory=set)  # those that come again later in the same batch
    cut_at: int | None = None  # the batch cannot go beyond this record, and nothing was claimed
    skipped: dict[Verdict, int] = field(default_factory=dict)
    collisions: list[Record] = field(default_factory=list)

    def skip(self, verdict: Verdict) -> None:
        self.skipped[verdict] = self.skipped.get(verdict, 0) + 1


class BusyElsewhere(Exception):
    """A message is being processed by someone else under a live lease: come back later."""


class Inbox:
    def __init__(self, key_of: Callable[[str], bytes], on_collision: str) -> None:
        self._key_of = key_of
        self._on_collision = on_collision
        self._clean_batches = CLEAN_BATCHES  # seen in a row; a new consumer has nothing to repeat

    async def claim(self, connection: Connection[Row], records: Sequence[Record]) -> Claims:
        """Decide for each record whether it is ours to do; those that failed to decode are claimed like any other."""
        claims = Claims()
        colliding: list[int] = []
        by_key = _index_if_plain(records)
        if by_key is None:
            by_key = {}
            for index, record in enumerate(records):
                if not record.in_inbox:
                    claims.mine.append(index)
                    continue
                if record.collided:
                    colliding.append(index)
                    continue
                earlier = by_key.setdefault(record.key, index)
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
        lost = await self._insert_first(connection, records, by_key)
        claims.mine += by_key.values() if not lost else [i for key, i in by_key.items() if key not in lost]
        if lost:
            colliding += await self._settle(connection, records, {key: by_key[key] for key in lost}, claims)
        if colliding:
            await self._claim_collisions(connection, records, colliding, claims)
        claims.mine.sort()
        return claims

    async def fail(self, connection: Connection[Row], failed: Sequence[Record]) -> None:
        """Keep the evidence. The rows of the same batch that were claimed as completed turn to failed."""
        if not failed:
            return
        failures = [record.failure or Failure("unknown", "") for record in failed]
        ids = [_row_id(record) for record in failed]
        await connection.execute(
            FAIL,
            _uuids(map(self._key_of, ids)),
            *_columns(failed),
            ids,
            [record.message.type for record in failed],
            [_error(failure) for failure in failures],
            [record.message.key for record in failed],
            [record.payload for record in failed],
            [_headers(record.message.headers) for record in failed],
        )

    async def keep_results(self, connection: Connection[Row], results: Sequence[tuple[Record, str]]) -> None:
        """In the messages' rows; a type without inbox has none, and must not touch that of another message."""
        results = [(record, result) for record, result in results if record.in_inbox]
        if results:
            await connection.execute(
                KEEP_RESULTS,
                _uuids(record.key for record, _ in results),
                [record.message.id for record, _ in results],
                [result for _, result in results],
            )

    async def _insert_first(
        self, connection: Connection[Row], records: Sequence[Record], by_key: dict[bytes, int]
    ) -> set[bytes]:
        """By COPY as long as no key was known. Must come first: what a failed COPY takes back is all there is."""
        if len(by_key) >= COPY_FROM and self._clean_batches >= CLEAN_BATCHES:
            if await _copy(connection, [records[index] for index in by_key.values()]):
                return set()
            self._clean_batches = 0
        return await self._insert(connection, records, by_key)

    async def _insert(
        self, connection: Connection[Row], records: Sequence[Record], by_key: dict[bytes, int]
    ) -> set[bytes]:
        """Insert a row for each of these; gives the keys that were there already."""
        if not by_key:
            return set()
        rows = await connection.fetch(CLAIM, _uuids(by_key), *_columns([records[i] for i in by_key.values()]))
        self._clean_batches = 0 if rows else self._clean_batches + 1
        return {row[0].bytes for row in rows}

    async def _settle(
        self, connection: Connection[Row], records: Sequence[Record], lost: dict[bytes, int], claims: Claims
    ) -> list[int]:
        """Read what is there under keys we did not get; returns the indices that collide."""
        colliding: list[int] = []
        to_take: dict[bytes, int] = {}
        found = {row["key"].bytes: row for row in await connection.fetch(LOOK_UP, _uuids(lost))}
        for key, index in lost.items():
            row = found.get(key)
            verdict = Verdict.BUSY if row is None else _judge(records[index], row)
            match verdict:
                case Verdict.FAILED_BEFORE:
                    to_take[key] = index
                case Verdict.COLLISION:
                    colliding.append(index)
                case Verdict.BUSY:
                    raise BusyElsewhere(records[index].message.id)
                case _:
                    claims.skip(verdict)
        if to_take:
            rows = await connection.fetch(
                TAKE_OVER,
                _uuids(to_take),
                [records[index].message.type for index in to_take.values()],
                [records[index].payload_hash for index in to_take.values()],
            )
            taken = {row["key"].bytes: row["attempts"] for row in rows}
            for key, index in to_take.items():
                if key not in taken:
                    raise BusyElsewhere(records[index].message.id)
                records[index].message.attempt = taken[key]
                claims.mine.append(index)
        return colliding

    async def _claim_collisions(
        self, connection: Connection[Row], records: Sequence[Record], colliding: list[int], claims: Claims
    ) -> None:
        """Same id, other payload: by policy. Failed or processed, it gets a row of its own under id and coordinates."""
        claims.collisions = [records[index] for index in colliding]
        if self._on_collision == "skip":
            return
        by_key = {}
        for index in colliding:
            record = records[index]
            if not record.collided:  # or else an earlier try of this batch has done this already
                record.collided = True
                if self._on_collision == "fail":
                    record.failure = Failure("collision", f"{record.message.id!r} is the id of another payload")
                record.message.id = f"{record.message.id}~{record.coordinates}"
                record.key = self._key_of(record.message.id)
            by_key[record.key] = index
        lost = await self._insert(connection, records, by_key)
        claims.mine += [index for key, index in by_key.items() if key not in lost]
        if lost:
            await self._settle(connection, records, {key: by_key[key] for key in lost}, claims)


_in_inbox, _collided, _key = attrgetter("in_inbox"), attrgetter("collided"), attrgetter("key")


def _index_if_plain(records: Sequence[Record]) -> dict[bytes, int] | None:
    """The records by key, if each has one of its own and nothing is special about any: the usual case, made fast."""
    if not all(map(_in_inbox, records)) or any(map(_collided, records)):
        return None
    by_key = {key: index for index, key in enumerate(map(_key, records))}
    return by_key if len(by_key) == len(records) else None


async def _copy(connection: Connection[Row], records: Sequence[Record]) -> bool:
    """Insert all rows at once; False, and the transaction as it began, if one of the keys is known."""
    rows = [
        _copied(4, 16, record.key, 4, record.assignment.source, 8, record.message.offset, 4, record.payload_hash)
        for record in records
    ]
    rows.sort()  # by key, since all begin alike

    async def source() -> AsyncIterator[bytes]:
        yield b"".join((_COPY_BEGIN, *rows, _COPY_END))

    try:
        await connection.copy_to_table("inbox", source=source(), columns=COPIED, format="binary")
    except Exception as error:
        if not postgres.is_known_key(error):
            raise
        await connection.execute(TAKE_BACK)
        return False
    return True


def _judge(record: Record, row: Row) -> Verdict:
    if row["status"] in ("failed", "pending"):
        return Verdict.FAILED_BEFORE
    if row["status"] == "processing":
        return Verdict.BUSY
    if (row["source"], row["offset"]) == (record.assignment.source, record.message.offset):
        return Verdict.REDELIVERY
    if row["payload_hash"] != record.payload_hash:
        return Verdict.COLLISION
    return Verdict.DUPLICATE


def _row_id(record: Record) -> str:
    """Where a failure is kept. A type without inbox must not touch the row of a message that has one."""
    return record.message.id if record.in_inbox else f"{record.message.id}~{record.coordinates}"


def _uuids(keys: Iterable[bytes]) -> list[str]:
    return [key.hex() for key in keys]


def _columns(records: Sequence[Record]) -> tuple[list[int], list[int], list[int]]:
    return (
        [record.assignment.source for record in records],
        [record.message.offset for record in records],
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
