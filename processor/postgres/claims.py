"""Claims: of each record of a batch it is decided whether it is ours to handle. The inbox's primary key decides.

A claim inserts rows as `completed` at once: they become visible only with the commit that makes it true. Nothing checks
first and acts later. Where a key exists already, the row under it says what the record is: a redelivery, a duplicate, a
collision, or a message that has failed or never ended.

Keys are always locked in sorted order, and before any row of a handler, so that two processes that claim the same
messages wait for each other in one direction only.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from itertools import repeat
from struct import Struct
from typing import TYPE_CHECKING

import orjson

from processor.messages.failure import Failure
from processor.postgres import parked_keys, sqlstates
from processor.postgres.rows import columns_of, uuids

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.messages.batch import Batch, Columns
    from processor.messages.record import Record

# Waits while another transaction holds one of the keys: the unique index is the lock. Returns the keys we did not get.
CLAIM = """
    WITH won AS (
        INSERT INTO inbox (key, partition_id, "offset", payload_hash)
        SELECT m.key, m.partition_id, m.position, m.hash
        FROM unnest($1::uuid[], $2::integer[], $3::bigint[], $4::integer[]) AS m(key, partition_id, position, hash)
        ORDER BY m.key
        ON CONFLICT DO NOTHING
        RETURNING key
    )
    SELECT m.key FROM unnest($1::uuid[]) AS m(key) WHERE NOT EXISTS (SELECT FROM won WHERE won.key = m.key)
"""

# The columns of the same rows for COPY, which takes half the time but fails if a single key is known.
COPIED = ("key", "partition_id", "offset", "payload_hash")
_copied = Struct("!h i16s ii iq ii").pack
_COPY_BEGIN = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END = b"\xff\xff"
# For fewer records a COPY costs more than it saves.
COPY_FROM = 100
# After a key that existed, this many batches without one must pass before the next COPY.
CLEAN_BATCHES = 16

# A separate statement, so that READ COMMITTED shows the row that the insert lost to.
LOOK_UP = """
    SELECT key, partition_id, "offset", payload_hash, status::text, attempts, coalesce(unfinished, 0) AS unfinished,
           first_failed_at, parked_key IS NOT NULL AS waits, lease_owner,
           extract(epoch FROM lease_until - now())::float8 AS lease_seconds,
           CASE WHEN status <> 'completed' THEN history::text END AS history,
           status = 'completed' AND greatest(received_at, finished_at, seen_again_at) < now() - $2::interval AS long_ago
    FROM inbox WHERE key = ANY ($1::uuid[])
"""

# Retention forgets a message a while after it was last seen. Only a repetition after a long time is noted: for others
# the time of the row is near enough. ANY in the update makes the planner use the index whatever the table's size.
SEEN_AGAIN = """
    WITH seen AS (
        SELECT key FROM inbox WHERE key = ANY ($1::uuid[]) AND status = 'completed' ORDER BY key FOR NO KEY UPDATE
    )
    UPDATE inbox SET seen_again_at = clock_timestamp() FROM seen
    WHERE inbox.key = seen.key AND inbox.key = ANY ($1::uuid[]) RETURNING inbox.key
"""

TAKE_OVER = """
    WITH taken AS (
        SELECT key FROM inbox
        WHERE key = ANY ($1::uuid[])
          AND (status IN ('failed', 'pending', 'parked')
               OR status = 'processing' AND (lease_owner = $3 OR lease_until < now()))
        ORDER BY key FOR UPDATE
    )
    UPDATE inbox SET status = 'completed', attempts = attempts + 1, finished_at = clock_timestamp(),
           type = m.type, error = NULL, record_key = NULL, payload = NULL, headers = NULL,
           unfinished = NULL, lease_owner = NULL, lease_until = NULL, redriven_at = NULL, parked_key = NULL
    FROM taken JOIN unnest($1::uuid[], $2::text[]) AS m(key, type) ON m.key = taken.key
    WHERE inbox.key = taken.key
    RETURNING inbox.key, inbox.attempts
"""


class PriorDelivery(Enum):
    """What an earlier delivery means for this one."""

    REDELIVERY = "redelivery"  # done, at these coordinates
    DUPLICATE = "duplicate"  # done, at other coordinates
    COLLISION = "collision"  # another payload has this id
    UNFINISHED = "unfinished"  # failed, or never ended; its outcome does not count: try again
    PARKED = "parked"  # waits behind a failed message of its key
    DISCARDED = "discarded"  # by an operator
    BUSY = "busy"  # another process is handling it
    NOT_OURS = "not ours"  # it is for another consumer, or a replay leaves it out


@dataclass(slots=True)
class Claims:
    """The outcome of one claim: which records are handled, and why the others are not."""

    mine: list[int] = field(default_factory=list)  # by index in the batch, in order
    repeated: set[int] = field(default_factory=set)  # those that come again later in the same batch
    skipped: dict[PriorDelivery, int] = field(default_factory=dict)
    collisions: list[Record] = field(default_factory=list)
    newly_failed: bool = False  # the claim itself has failed a record

    def skip(self, prior: PriorDelivery) -> None:
        self.skipped[prior] = self.skipped.get(prior, 0) + 1


@dataclass(frozen=True, slots=True)
class CutBefore:
    """The batch has to end before this record; nothing was claimed."""

    index: int


@dataclass(frozen=True, slots=True)
class BusyElsewhere:
    """Another process is handling a message under a live lease; nothing was claimed, so try again later."""

    record: Record
    seconds: float | None = None  # until the lease expires


class Claiming:
    def __init__(
        self, key_of: Callable[[str], bytes], on_collision: str, owner: str, grain: timedelta | None = None
    ) -> None:
        """A completed message that comes again `grain` after it was last seen is noted; if None, none is."""
        self._key_of = key_of
        self._on_collision = on_collision
        self._owner = owner
        self._grain = grain
        self._clean_batches = CLEAN_BATCHES  # in a row without a known key; a new consumer has nothing to repeat

    async def claim(self, connection: Connection[Row], batch: Batch) -> Claims | CutBefore | BusyElsewhere | None:
        """Decide for each record whether it is ours to do; those that failed or wait are claimed like any other.

        None if a key that was expected to be unknown is known: the transaction has failed, and has to begin anew.
        """
        if (columns := batch.columns) is not None:
            keys = columns.column("inbox_keys")
            if columns.message_type.in_inbox and self._expects_unknown(len(keys)) and len(set(keys)) == len(keys):
                copied = await self._copy(connection, _copied_columns(columns))
                return Claims(list(range(len(keys)))) if copied else None
        records = batch.as_rows()
        claims = Claims()
        colliding: list[int] = []
        by_key: dict[bytes, int] = {}
        rivals: dict[int, int] = {}  # of those with the id of an earlier one in this batch, and another payload
        for index, record in enumerate(records):
            if record.not_ours:
                claims.skip(PriorDelivery.NOT_OURS)
                continue
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
                # The earlier one has failed, and a failure does not count: this one has to be tried in a later batch.
                return CutBefore(index)
            if records[earlier].payload_hash == record.payload_hash:
                claims.skip(PriorDelivery.DUPLICATE)
                claims.repeated.add(earlier)
            else:
                rivals[index] = earlier
        if self._expects_unknown(len(by_key)):
            if not await self._copy(connection, _copied_rows([records[index] for index in by_key.values()])):
                return None
            claims.mine += by_key.values()
        else:
            settled = await self._claim_keys(connection, records, by_key, claims)
            if isinstance(settled, CutBefore | BusyElsewhere):
                return settled
            if undecided := [index for index, earlier in rivals.items() if earlier in settled]:
                return CutBefore(min(undecided))  # it may repeat the message that the id belongs to: a later batch asks
            colliding += settled
        colliding += rivals
        if colliding:
            settled = await self._claim_collisions(connection, records, colliding, claims)
            if isinstance(settled, CutBefore | BusyElsewhere):
                return settled
        claims.mine.sort()
        return claims

    def _expects_unknown(self, count: int) -> bool:
        """Whether this many rows are worth a COPY, which fails as a whole if a single key is known."""
        return count >= COPY_FROM and self._clean_batches >= CLEAN_BATCHES

    async def _copy(self, connection: Connection[Row], rows: list[bytes]) -> bool:
        """Insert all rows at once; False, and the transaction has failed, if one of the keys is known."""
        rows.sort()  # by key, since all begin alike

        async def source() -> AsyncIterator[bytes]:
            yield b"".join((_COPY_BEGIN, *rows, _COPY_END))

        try:
            await connection.copy_to_table("inbox", source=source(), columns=COPIED, format="binary")
        except Exception as error:
            if not sqlstates.is_known_key(error):
                raise
            self._clean_batches = 0
            return False
        return True

    async def _claim_keys(
        self, connection: Connection[Row], records: Sequence[Record], by_key: dict[bytes, int], claims: Claims
    ) -> list[int] | CutBefore | BusyElsewhere:
        """Insert a row for each key, and settle the keys that existed already; return the indices that collide."""
        known = await self._insert(connection, records, by_key)
        claims.mine += [index for key, index in by_key.items() if key not in known]
        return await self._settle(connection, records, {key: by_key[key] for key in known}, claims) if known else []

    async def _insert(
        self, connection: Connection[Row], records: Sequence[Record], by_key: dict[bytes, int]
    ) -> set[bytes]:
        """Insert a row for each of these; return the keys that existed already."""
        if not by_key:
            return set()
        rows = await connection.fetch(CLAIM, uuids(by_key), *columns_of([records[i] for i in by_key.values()]))
        self._clean_batches = 0 if rows else self._clean_batches + 1
        return {row[0].bytes for row in rows}

    async def _settle(
        self, connection: Connection[Row], records: Sequence[Record], lost: dict[bytes, int], claims: Claims
    ) -> list[int] | CutBefore | BusyElsewhere:
        """Read the rows of keys that we did not get, and decide by them; return the indices that collide."""
        colliding: list[int] = []
        to_take: dict[bytes, int] = {}
        waiting: list[Record] = []
        again: dict[bytes, int] = {}
        found = {row["key"].bytes: row for row in await connection.fetch(LOOK_UP, uuids(lost), self._grain)}
        for key, index in lost.items():
            record, row = records[index], found.get(key)
            verdict = PriorDelivery.BUSY if row is None else self._judge(record, row)
            record.elsewhere = row is not None and row["partition_id"] != record.reading.partition_id
            if row is not None and row["long_ago"] and verdict is not PriorDelivery.REDELIVERY:
                again[key] = index
            match verdict:
                case PriorDelivery.UNFINISHED:
                    assert row is not None
                    to_take[key] = index
                    record.failed_as = _ways(row["history"])
                case PriorDelivery.COLLISION:
                    colliding.append(index)
                case PriorDelivery.BUSY:
                    return BusyElsewhere(record, row["lease_seconds"] if row is not None else None)
                case _:
                    if verdict is PriorDelivery.PARKED and record.elsewhere:
                        waiting.append(record)
                    claims.skip(verdict)
        await parked_keys.repeat(connection, waiting)
        unknown = min(
            (i for k, i in to_take.items() if found[k]["status"] == "pending" and not records[i].alone), default=None
        )
        if unknown is not None:
            # It failed before, or killed the process that tried it: now it runs alone, and its start is recorded.
            records[unknown].alone = True
            return CutBefore(unknown)
        if again:
            noted = {row["key"].bytes for row in await connection.fetch(SEEN_AGAIN, uuids(again))}
            for key, index in again.items():
                if key not in noted:  # just forgotten: at the next try it is new
                    return BusyElsewhere(records[index])
        if to_take:
            rows = await connection.fetch(
                TAKE_OVER,
                uuids(to_take),
                [records[index].message.type for index in to_take.values()],
                self._owner,
            )
            taken = {row["key"].bytes: row["attempts"] for row in rows}
            for key, index in to_take.items():
                if key not in taken:
                    return BusyElsewhere(records[index])
                records[index].message.attempt = taken[key]
                claims.mine.append(index)
        return colliding

    def _judge(self, record: Record, row: Row) -> PriorDelivery:
        """Decide by the earlier row. An id belongs to the payload that came with it first, whatever its outcome."""
        status = row["status"]
        place = (record.reading.partition_id, record.message.offset)
        if status in ("completed", "discarded") and (row["partition_id"], row["offset"]) == place:
            return PriorDelivery.REDELIVERY
        if row["payload_hash"] != record.payload_hash and not record.collided:
            return PriorDelivery.COLLISION
        match status:
            case "completed":
                return PriorDelivery.DUPLICATE
            case "discarded":
                return PriorDelivery.DISCARDED
            case "processing":
                ours = row["lease_owner"] == self._owner or (row["lease_seconds"] or -1.0) < 0
                return PriorDelivery.UNFINISHED if ours else PriorDelivery.BUSY
            case _:
                return PriorDelivery.PARKED if record.parked and row["waits"] else PriorDelivery.UNFINISHED

    async def _claim_collisions(
        self, connection: Connection[Row], records: Sequence[Record], colliding: list[int], claims: Claims
    ) -> list[int] | CutBefore | BusyElsewhere:
        """Skip, fail or process messages with another payload under a known id, as the policy says.

        Failed or processed, each gets a row of its own, under its id and coordinates.
        """
        claims.collisions = [records[index] for index in colliding]
        if self._on_collision == "skip":
            return []
        by_key = {}
        for index in colliding:
            record = records[index]
            if not record.collided:  # otherwise an earlier try of this batch has done this already
                record.collided = True
                if self._on_collision == "fail":
                    claims.newly_failed = True
                    record.parked = False  # it would still collide after waiting
                    record.failure = Failure("collision", f"{record.message.id!r} is the id of another payload")
                record.message.id = f"{record.message.id}~{record.place}"
                record.key = self._key_of(record.message.id)
            by_key[record.key] = index
        return await self._claim_keys(connection, records, by_key, claims)


def _copied_columns(columns: Columns) -> list[bytes]:
    """In the binary form of COPY; each value has its length before it."""
    rows: list[bytes] = []
    for span in columns.spans:
        of_all = repeat(span.reading.partition_id)
        rows += map(_copied, _4, _16, span.inbox_keys, _4, of_all, _8, span.offsets, _4, span.checksums)
    return rows


def _copied_rows(records: Sequence[Record]) -> list[bytes]:
    """The same for rows."""
    ids, offsets, hashes = columns_of(records)
    return list(map(_copied, _4, _16, [record.key for record in records], _4, ids, _8, offsets, _4, hashes))


_4, _8, _16 = repeat(4), repeat(8), repeat(16)


def _ways(history: str | None) -> frozenset[tuple[str | None, ...]]:
    """Return the ways in which a message has failed for good before: see Failure.way."""
    names = ("class", "reason", "exception", "sqlstate")
    events = orjson.loads(history or "[]")
    return frozenset(tuple(map(event.get, names)) for event in events if event["event"] == "failed")
