"""What is failed or parked, found in the inbox: listed, shown, sent once more, or given up.

A message is sent to where it came from, its bytes as they came, with a header that names its id; the service takes
over the row it finds there. Sending twice does no harm, but a row that says "sent" without a record in Kafka would
be forgotten: so rows are marked after the delivery reports, and whoever dies in between sends them again.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

import orjson
from confluent_kafka import KafkaError, KafkaException, Producer

from processor.errors import ProcessorError, SetupError
from processor.messages import identity
from processor.messages.decode import REDRIVE
from processor.messages.message import Partition
from processor.postgres import migrate, parked_keys
from processor.settings import librdkafka

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.settings.kafka import KafkaSettings
    from processor.settings.schema import Settings

STATUSES = ("failed", "parked", "discarded", "pending", "processing")
REPAIRABLE = ("failed", "parked")

# Rows without their payloads are read by the page, so that sorting them is not repeated for each chunk.
PAGE_ROWS = 10_000
# Payloads are held, sent and marked by the chunk.
CHUNK_ROWS = 500
CHUNK_BYTES = 8_388_608
POLL_SECONDS = (0.05, 1.0)
METADATA_SECONDS = 10.0
DELIVERY_MS = 30_000
# A message that the service passes over again and again although nothing is before it will not be taken the next time.
SENDS = 3

SOURCES = """
    SELECT s.source, topic, partition FROM ledger, unnest(former || ledger.source) AS s(source)
    WHERE consumer = $1 AND ($2::text IS NULL OR topic = $2) AND ($3::integer IS NULL OR partition = $3)
    ORDER BY s.source
"""

# `->>` fails on a text that has \u0000 anywhere; json, unlike jsonb, can hold it, and errors do.
_ERROR = r"""(CASE WHEN strpos(error::text, '\u0000') = 0 THEN error
              ELSE regexp_replace(error::text, '(?<!\\)((\\\\)*)\\u0000', '\1', 'g')::json END)"""
# What another payload has the id of is not processed because somebody sends everything once more.
_COLLIDED = f"(status = 'failed' AND coalesce({_ERROR} ->> 'reason', '') = 'collision')"
_FAILED_AT = "coalesce(finished_at, first_failed_at, received_at)"

# The first condition is implied by the second, but only as it stands does it lead to the index inbox_unfinished.
_MATCHES = f"""
    status <> 'completed' AND status = ANY ($2::text[]::inbox_status[])
    AND ($3::uuid[] IS NULL OR key = ANY ($3))
    AND ($4::bytea IS NULL OR record_key = $4)
    AND ($5::text IS NULL OR type = $5)
    AND ($6::text IS NULL OR {_ERROR} ->> 'class' = $6)
    AND ($7::text IS NULL OR {_ERROR} ->> 'reason' = $7)
    AND ($8::timestamptz IS NULL OR {_FAILED_AT} >= $8)
    AND ($9::timestamptz IS NULL OR {_FAILED_AT} < $9)
"""

COUNT = f"SELECT count(*) FROM inbox WHERE source = ANY ($1::integer[]) AND {_MATCHES}"  # noqa: S608 - our constants

LIST = f"""
    SELECT key, source, "offset", status::text, message_id, type, record_key, error::text, attempts, parked_key,
           received_at, first_failed_at, finished_at, redriven_at, octet_length(payload) AS bytes
    FROM inbox WHERE source = ANY ($1::integer[]) AND {_MATCHES}
    ORDER BY source, "offset", key LIMIT $10
"""  # noqa: S608 - our constants

SHOW = """
    SELECT topic, partition, key, "offset", status::text, message_id, type, record_key, payload, headers::text,
           error::text, attempts, coalesce(inbox.starts, 0) AS starts, parked_key, timestamp_ms, received_at,
           first_failed_at, finished_at, redriven_at, lease_owner, lease_until, result::text, history::text
    FROM inbox JOIN ledger ON inbox.source = ledger.source OR inbox.source = ANY (former)
    WHERE key = $1 AND consumer = $2
"""

_SIZE = (
    "coalesce(octet_length(payload), 0) + coalesce(octet_length(record_key), 0) + coalesce(pg_column_size(headers), 0)"
)
_NARROW = f'key, source, "offset", status::text, message_id, type, record_key, parked_key, {_SIZE} AS bytes'

# Sent, and the service has gone beyond it without touching the row. What came from a topic that was deleted since is
# sent to the one that has its name now.
_PASSED_OVER = """coalesce(
    (SELECT next_offset FROM ledger WHERE ledger.source = inbox.source),
    (SELECT next_offset FROM ledger WHERE inbox.source = ANY (former))
) > (
    SELECT max((event ->> 'offset')::bigint) FROM jsonb_array_elements(history) AS event
    WHERE event ->> 'event' = 'redriven'
)"""

# Parked ones count even if they were sent: their key is not free yet.
SCOPE = f"""
    SELECT count(*) FILTER (WHERE parked_key IS NULL) AS single,
           max("offset") FILTER (WHERE parked_key IS NULL) AS last,
           count(*) AS matched,
           coalesce(array_agg(DISTINCT parked_key) FILTER (WHERE parked_key IS NOT NULL), '{{}}') AS keys
    FROM (
        SELECT "offset", parked_key FROM inbox
        WHERE source = ANY ($1::integer[]) AND {_MATCHES} AND (NOT {_COLLIDED} OR key = ANY ($10::uuid[]))
              AND (parked_key IS NOT NULL OR redriven_at IS NULL OR $11)
        ORDER BY "offset", key LIMIT $12
    ) AS matched
"""  # noqa: S608 - our constants

WAITING = f"""
    SELECT count(*) FROM inbox
    WHERE source = ANY ($1::integer[]) AND {_MATCHES} AND parked_key IS NULL AND redriven_at IS NOT NULL
"""  # noqa: S608 - our constants

COLLISIONS = f"""
    SELECT count(*) FROM inbox
    WHERE source = ANY ($1::integer[]) AND {_MATCHES} AND {_COLLIDED} AND NOT key = ANY ($10::uuid[])
"""  # noqa: S608 - our constants

# Those that match; for parked keys, all that belongs to the key, whether it matches or not.
_TO_SEND = f"""
    FROM inbox
    WHERE source = ANY ($1::integer[]) AND status <> 'completed' AND status IN ('failed', 'parked')
      AND (NOT {_COLLIDED} OR key = ANY ($10::uuid[]))
      AND CASE WHEN parked_key IS NULL THEN "offset" <= $12 AND (redriven_at IS NULL OR $11) AND {_MATCHES}
               ELSE parked_key = ANY ($13::bytea[]) AND (redriven_at IS NULL OR $11 OR {_PASSED_OVER}) END
"""
COUNT_TO_SEND = f"SELECT count(*) {_TO_SEND}"
PAGE_TO_SEND = f"""
    SELECT {_NARROW} {_TO_SEND} AND ("offset", key) > ($14, $15) ORDER BY "offset", key LIMIT $16
"""

PAGE_TO_DISCARD = f"""
    SELECT {_NARROW} FROM inbox
    WHERE source = ANY ($1::integer[]) AND {_MATCHES} AND ("offset", key) > ($10, $11)
    ORDER BY "offset", key LIMIT $12
"""  # noqa: S608 - our constants

PAGE_OF_KEYS = f"""
    SELECT {_NARROW} FROM inbox
    WHERE source = $1 AND parked_key = ANY ($2::bytea[]) AND parked_key IS NOT NULL AND status IN ('failed', 'parked')
      AND (NOT {_COLLIDED} OR key = ANY ($3::uuid[]))
      AND (redriven_at IS NULL OR $4 AND {_PASSED_OVER}) AND ("offset", key) > ($5, $6)
    ORDER BY "offset", key LIMIT $7
"""  # noqa: S608 - our constants

# The row's version tells later whether the service was faster than the delivery report.
LOAD = """
    SELECT key, xmin::text AS version, "offset", message_id, record_key, payload, headers::text FROM inbox
    WHERE key = ANY ($1::uuid[]) AND status IN ('failed', 'parked') ORDER BY "offset", key
"""

# Locks in the order of the engine. A row that the service has touched since it was read is not waiting any more.
MARK = """
    WITH locked AS (SELECT key FROM inbox WHERE key = ANY ($1::uuid[]) ORDER BY key FOR UPDATE)
    UPDATE inbox
    SET redriven_at = CASE WHEN inbox.xmin::text = m.version THEN now() ELSE inbox.redriven_at END,
        history = coalesce(inbox.history, '[]') || m.event
    FROM locked JOIN unnest($1::uuid[], $2::text[], $3::jsonb[]) AS m(key, version, event) ON m.key = locked.key
    WHERE inbox.key = locked.key
"""

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

# What each key waits for; nothing if it waits for nothing.
HEADS = f"""
    SELECT k.source, k.parked_key, head.*
    FROM unnest($1::integer[], $2::bytea[]) AS k(source, parked_key)
    CROSS JOIN LATERAL (
        SELECT inbox.key, inbox.source AS home, status::text, message_id, redriven_at, inbox.xmin::text AS version,
               {_PASSED_OVER} AS passed_over, {_COLLIDED} AS collided
        FROM ({parked_keys.QUEUE.format(limit=1)}) AS first JOIN inbox ON inbox.key = first.key
    ) AS head
"""  # noqa: S608 - our constants
# What has become of messages that were sent.
STATES = f"""
    SELECT key, xmin::text AS version, status::text, message_id, redriven_at, {_PASSED_OVER} AS passed_over
    FROM inbox WHERE key = ANY ($1::uuid[])
"""  # noqa: S608 - our constants
POSITIONS = """
    SELECT source, next_offset FROM ledger WHERE source = ANY ($1::integer[]) OR former && $1::integer[] ORDER BY source
"""

BEGINNING = (-1, UUID(int=0))


class WrongUse(ProcessorError):
    """The command line asks for something that cannot be meant."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Filter:
    """Which messages; what is not given matches all."""

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
    despite_collision: bool = False  # of those that are named: process each as a message of its own

    def is_given(self) -> bool:
        return replace(self, statuses=REPAIRABLE) != Filter()

    def arguments(self, consumer: str, sources: Iterable[int]) -> list[Any]:
        """$1 to $9 of the statements."""
        key_of = identity.inbox_key(consumer)
        keys = [key_of(id_).hex() for id_ in self.ids] or None
        matched = [keys, self.key, self.type, self.error_class, self.reason, self.since, self.until]
        return [list(sources), list(self.statuses), *matched]

    def allowed(self, consumer: str) -> list[str]:
        """Keys of collisions that may be sent."""
        key_of = identity.inbox_key(consumer)
        return [key_of(id_).hex() for id_ in self.ids] if self.despite_collision else []


@dataclass(slots=True)
class Listing:
    messages: list[dict[str, Any]]
    total: int


@dataclass(slots=True)
class Scope:
    """What is to be sent of one partition."""

    source: int
    partition: Partition
    arguments: list[Any]
    keys: list[bytes]
    total: int


@dataclass(slots=True)
class Outcome:
    """How far a redrive got."""

    total: int = 0
    sent: int = 0
    followed: bool = False  # whether it is known what has become of those
    completed: int = 0
    parked: int = 0  # wait again
    left: int = 0  # the service has not come to them yet
    keys: int = 0
    keys_left: int = 0
    collisions: int = 0  # that match, and were left alone
    failed_again: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)  # collisions that keep a key parked
    elsewhere: list[str] = field(default_factory=list)  # messages of other partitions that do
    passed_over: list[str] = field(default_factory=list)
    stalled: bool = False
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        return not (self.failed_again or self.held or self.elsewhere or self.passed_over or self.stalled)


class Watcher(Protocol):
    """Is told how a redrive proceeds."""

    def begin(self, total: int) -> None:
        """So many messages are to be sent."""

    def sent(self, outcome: Outcome) -> None:
        """A chunk is in Kafka and marked."""

    def waiting(self, outcome: Outcome) -> None:
        """All is sent; some messages are not processed yet, or keys not free."""


def moment(text: str, now: datetime) -> datetime:
    """An ISO time, UTC unless it says otherwise, or how long ago, as in 2h or 1d12h."""
    ago = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    try:
        if ago and any(ago.groups()):
            days, hours, minutes, seconds = (int(number or 0) for number in ago.groups())
            return now - timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        at = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError):
        raise WrongUse(
            f"{text!r} is no time: give one such as 2025-03-01T12:00Z, or how long ago, such as 2h"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def headers_of(stored: str | None) -> list[tuple[str, bytes | None]]:
    """The record's headers, byte for byte, from their form in the inbox."""
    return [(name, _header_value(value)) for name, value in orjson.loads(stored or "[]")]


def _header_value(value: Any) -> bytes | None:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"])
    return None if value is None else str(value).encode()


@asynccontextmanager
async def opened(settings: Settings) -> AsyncIterator[Connection[Row]]:
    """A connection to a database that has the tables as this release knows them."""
    async with migrate.connected(settings) as db:
        await migrate.require_current(db, [migrate.core(settings)])
        try:
            yield db
        except ProcessorError:
            raise
        except Exception as error:
            if not db.is_closed():
                raise
            text = " ".join(settings.redact(str(error)).split())
            raise SetupError(f"the connection to the database was lost: {text}; run the command again") from None


async def listed(db: Connection[Row], consumer: str, wanted: Filter, limit: int) -> Listing:
    """The first few that match, by partition and offset, and how many match in all."""
    partitions = await _partitions(db, consumer, wanted)
    arguments = wanted.arguments(consumer, partitions)
    rows = await db.fetch(LIST, *arguments, limit)
    total = len(rows) if len(rows) < limit else await db.fetchval(COUNT, *arguments)
    return Listing([_described(row, partitions[row["source"]]) for row in rows], total)


async def shown(db: Connection[Row], consumer: str, message_id: str) -> Row:
    """Everything that is known about one message; also of one that is done."""
    row = await db.fetchrow(SHOW, UUID(bytes=identity.inbox_key(consumer)(message_id)), consumer)
    if row is None:
        raise SetupError(f"{consumer} has no message {message_id!r} in its inbox; `processor dlq list` shows the ids")
    return row


async def count(db: Connection[Row], consumer: str, wanted: Filter) -> int:
    partitions = await _partitions(db, consumer, wanted)
    found: int = await db.fetchval(COUNT, *wanted.arguments(consumer, partitions))
    return found


async def discard(db: Connection[Row], consumer: str, wanted: Filter, by: str, reason: str) -> tuple[int, int]:
    """How many were given up, and how many parked keys still have messages that wait."""
    partitions = await _partitions(db, consumer, wanted)
    event = {"event": "discarded", "by": by, "reason": reason}
    discarded, keys = 0, set()
    for source in partitions:
        arguments = wanted.arguments(consumer, [source])
        async for page in _pages(db, PAGE_TO_DISCARD, arguments):
            for start in range(0, len(page), CHUNK_ROWS):
                rows = page[start : start + CHUNK_ROWS]
                done = await db.fetch(DISCARD, [row["key"] for row in rows], _event(event))
                discarded += len(done)
                keys |= {(source, row["parked_key"]) for row in rows if row["parked_key"] is not None}
    return discarded, len(await _heads(db, keys))


async def plan(
    db: Connection[Row], consumer: str, wanted: Filter, *, again: bool = False, limit: int | None = None
) -> list[Scope]:
    """What a redrive would send, partition by partition. `limit` counts matches; a parked key is taken as a whole."""
    scopes = []
    allowed = wanted.allowed(consumer)
    for source, partition in (await _partitions(db, consumer, wanted)).items():
        arguments = wanted.arguments(consumer, [source])
        found = await db.fetchrow(SCOPE, *arguments, allowed, again, limit)
        assert found is not None
        if limit is not None:
            limit -= found["matched"]
        arguments += [allowed, again, -1 if found["last"] is None else found["last"], found["keys"]]
        total = await db.fetchval(COUNT_TO_SEND, *arguments)
        if total or found["keys"]:
            scopes.append(Scope(source, partition, arguments, found["keys"], total))
    return scopes


async def waiting(db: Connection[Row], consumer: str, wanted: Filter) -> int:
    """How many of the matching ones were sent already and not processed yet."""
    partitions = await _partitions(db, consumer, wanted)
    found: int = await db.fetchval(WAITING, *wanted.arguments(consumer, partitions))
    return found


async def collisions(db: Connection[Row], consumer: str, wanted: Filter) -> int:
    """How many of the matching ones a redrive leaves alone."""
    partitions = await _partitions(db, consumer, wanted)
    arguments = [*wanted.arguments(consumer, partitions), wanted.allowed(consumer)]
    found: int = await db.fetchval(COLLISIONS, *arguments)
    return found


async def to_send(db: Connection[Row], scopes: Iterable[Scope]) -> AsyncIterator[tuple[Scope, list[Row]]]:
    """The rows of a plan by the page, in order, without their payloads."""
    for scope in scopes:
        async for page in _pages(db, PAGE_TO_SEND, scope.arguments):
            yield scope, page


class Sender:
    """Sends records to where they came from, and says at which offset each arrived."""

    def __init__(self, settings: KafkaSettings, consumer: str, rate: float | None, stop: asyncio.Event) -> None:
        self._producer = Producer(producer_config(settings, consumer), logger=logging.getLogger("librdkafka"))
        self._consumer = consumer
        self._stop = stop
        self._pause = 1 / rate if rate else 0.0
        self._next = time.monotonic()
        # What is marked together took a second to send at most, however slow that is meant to be.
        self.chunk_rows = max(1, min(CHUNK_ROWS, int(rate))) if rate else CHUNK_ROWS

    async def check(self, partitions: Iterable[Partition]) -> None:
        """Before anything is sent: a producer that asks for a topic by name might create it."""
        try:
            topics = (await asyncio.to_thread(self._producer.list_topics, timeout=METADATA_SECONDS)).topics
        except KafkaException as error:
            raise SetupError(
                f"kafka.bootstrap_servers: the brokers do not answer: {error.args[0].str()}; nothing was sent"
            ) from None
        for partition in partitions:
            if partition.topic not in topics or partition.number not in topics[partition.topic].partitions:
                raise SetupError(f"{partition} does not exist any more: create it, or discard its messages")

    async def send(self, partition: Partition, rows: Sequence[Row]) -> tuple[dict[UUID, int], str | None]:
        """The offsets of those that arrived, and what went wrong with the first that did not."""
        delivered: dict[UUID, int] = {}
        errors: list[KafkaError] = []
        for row in rows:
            await self._pace()
            if self._stop.is_set() or errors:
                break
            if error := self._produce(partition, row, _report(row["key"], delivered, errors)):
                errors.append(error)
        await asyncio.to_thread(self._producer.flush)
        return delivered, _explained(partition, errors[0]) if errors else None

    def _produce(
        self, partition: Partition, row: Row, report: Callable[[KafkaError | None, Any], None]
    ) -> KafkaError | None:
        named = (REDRIVE, f"{self._consumer}:{row['message_id']}".encode())
        headers: Any = [*headers_of(row["headers"]), named]  # declared as text alone
        while True:
            try:
                # Stamped with the time of today: the original's could be so old that Kafka deletes it at once.
                self._producer.produce(
                    partition.topic,
                    row["payload"],
                    row["record_key"],
                    partition.number,
                    on_delivery=report,
                    headers=headers,
                )
            except BufferError:
                self._producer.poll(0.1)
            except KafkaException as error:
                found: KafkaError = error.args[0]
                return found
            else:
                self._producer.poll(0)
                return None

    async def _pace(self) -> None:
        now = time.monotonic()
        delay, self._next = self._next - now, max(now, self._next) + self._pause
        if delay > 0:
            await _pause(self._stop, delay)


def producer_config(settings: KafkaSettings, consumer: str) -> dict[str, Any]:
    """That of the service's producer, without its transactions: idempotent, in order, every delivery reported."""
    config = settings.producer_config(f"{consumer}-redrive")
    for name in ("transactional.id", "transaction.timeout.ms", "delivery.report.only.error"):
        config.pop(name, None)
    given = {librdkafka.canonical(name) for name in (*settings.client, *settings.producer)}
    ours = {
        "message.timeout.ms": DELIVERY_MS,
        "retry.backoff.ms": 100,
        # The topic took it once, so the topic is to judge.
        "message.max.bytes": 1_000_000_000,
    }
    return config | {name: value for name, value in ours.items() if name not in given}


class Redrive:
    """Sends a plan's messages and sees what becomes of them; for parked keys goes on until they are free."""

    def __init__(
        self,
        db: Connection[Row],
        sender: Sender,
        scopes: Sequence[Scope],
        allowed: Sequence[str],
        by: str,
        stop: asyncio.Event,
        watcher: Watcher,
    ) -> None:
        self._allowed = allowed  # keys of collisions
        self._db = db
        self._sender = sender
        self._scopes = scopes
        self._by = by
        self._stop = stop
        self._watcher = watcher
        self._partitions = {scope.source: scope.partition for scope in scopes}
        self._keys = {(scope.source, key) for scope in scopes for key in scope.keys}
        self._sends: dict[UUID, int] = {}
        self._open: set[UUID] = set()  # those that the service has not come to yet, as far as is known
        self._in_keys: set[UUID] = set()
        self.outcome = Outcome(total=sum(scope.total for scope in scopes), keys=len(self._keys))

    async def run(self, timeout_seconds: float | None) -> Outcome:
        """`timeout_seconds`: how long nothing may move while the service is waited for; None: do not wait."""
        self._watcher.begin(self.outcome.total)
        await self._sender.check(self._partitions.values())
        async for scope, page in to_send(self._db, self._scopes):
            await self._send(scope.partition, page)
            if self._stop.is_set():
                break
        if timeout_seconds is not None and not self._stop.is_set():
            await self._follow(timeout_seconds)
        self.outcome.keys_left = len(await _heads(self._db, self._keys))
        self.outcome.interrupted = self._stop.is_set()
        return self.outcome

    async def _send(self, partition: Partition, page: Sequence[Row]) -> None:
        for chunk in _chunks(page, self._sender.chunk_rows):
            if self._stop.is_set():
                return
            rows = await self._db.fetch(LOAD, [row["key"] for row in chunk])
            sent_at = datetime.now(UTC)
            delivered, error = await self._sender.send(partition, rows)
            await self._mark([row for row in rows if row["key"] in delivered], delivered, sent_at)
            self._sends |= {key: self._sends.get(key, 0) + 1 for key in delivered}
            in_keys = {row["key"] for row in chunk if row["parked_key"] is not None}
            self._in_keys |= in_keys & delivered.keys()
            self._open |= delivered.keys() - in_keys
            self.outcome.sent = len(self._sends)
            self._watcher.sent(self.outcome)
            if error:
                raise SetupError(f"{error}; {self.outcome.sent} sent and marked; run the command again for the rest")

    async def _mark(self, rows: Sequence[Row], offsets: dict[UUID, int], sent_at: datetime) -> None:
        if rows:
            event = {"event": "redriven", "by": self._by}
            events = [_event({**event, "offset": offsets[row["key"]]}, sent_at) for row in rows]
            await self._db.execute(MARK, [row["key"] for row in rows], [row["version"] for row in rows], events)

    async def _follow(self, timeout_seconds: float) -> None:
        """Until the service has come to all that was sent, and every key is free or stuck."""
        keys = set(self._keys)
        seen: Any = None
        moved = time.monotonic()
        interval = POLL_SECONDS[0]
        while (keys or self._open) and not self._stop.is_set():
            positions = [tuple(row) for row in await self._db.fetch(POSITIONS, list(self._partitions))]
            heads = await _heads(self._db, keys)
            keys &= heads.keys()
            stuck, passed_over = self._judge(heads, keys)
            keys -= stuck
            await self._send_more(keys & passed_over, passed_over=True)
            await self._send_more(keys - passed_over, passed_over=False)
            touched = await self._settle() | {(head["key"], head["version"]) for head in heads.values()}
            state = (positions, touched, sum(self._sends.values()))
            if state != seen:
                seen, moved, interval = state, time.monotonic(), POLL_SECONDS[0]
            elif time.monotonic() - moved > timeout_seconds:
                self.outcome.stalled = True
                break
            if keys or self._open:
                self.outcome.left, self.outcome.keys_left = len(self._open), len(keys)
                self._watcher.waiting(self.outcome)
                await _pause(self._stop, interval)
                interval = min(2 * interval, POLL_SECONDS[1])
        self._open |= self._in_keys
        await self._settle()
        self.outcome.followed = True
        self.outcome.left = len(self._open)

    async def _settle(self) -> set[tuple[UUID, str]]:
        """Count what the service has come to an end with; gives the versions of the rows that are left."""
        left = set()
        for keys in _batched(list(self._open), PAGE_ROWS):
            rows = {row["key"]: row for row in await self._db.fetch(STATES, keys)}
            for key in keys:
                row = rows.get(key)
                waits = row is not None and row["redriven_at"] is not None and not row["passed_over"]
                if row is None or row["status"] == "completed":
                    self.outcome.completed += 1
                elif row["status"] == "failed" and row["redriven_at"] is None:
                    self.outcome.failed_again.append(row["message_id"])
                elif row["status"] in REPAIRABLE and not waits:
                    if row["status"] == "parked" or key in self._in_keys:
                        self.outcome.parked += 1
                    else:
                        self.outcome.passed_over.append(row["message_id"])
                elif row["status"] != "discarded":
                    left.add((key, row["version"]))
                    continue
                self._open.discard(key)
        return left

    def _judge(
        self, heads: dict[tuple[int, bytes], Row], keys: set[tuple[int, bytes]]
    ) -> tuple[set[tuple[int, bytes]], set[tuple[int, bytes]]]:
        """Keys of which nothing more can be hoped for, and those whose first message has to be sent again."""
        stuck, passed_over = set(), set()
        for place, head in heads.items():
            if head["home"] != place[0]:  # it is sent to the partition where its row is, or by nobody
                if (head["home"], place[1]) not in keys:
                    if head["key"] not in self._sends:
                        self.outcome.elsewhere.append(head["message_id"])
                    stuck.add(place)
                continue
            sends = self._sends.get(head["key"], 0)
            if head["collided"] and head["key"].hex not in self._allowed:
                self.outcome.held.append(head["message_id"])
                stuck.add(place)
                continue
            if head["status"] not in REPAIRABLE or (head["redriven_at"] is not None and not head["passed_over"]):
                continue
            if sends and head["status"] == "failed" and head["redriven_at"] is None:
                stuck.add(place)
            elif sends >= SENDS:
                self.outcome.passed_over.append(head["message_id"])
                stuck.add(place)
            else:
                passed_over.add(place)
        return stuck, passed_over

    async def _send_more(self, places: set[tuple[int, bytes]], *, passed_over: bool) -> None:
        """What has come since; what came before its turn is sent again only when its turn has come."""
        for source in sorted({source for source, _ in places}):
            keys = [key for at, key in places if at == source]
            async for page in _pages(self._db, PAGE_OF_KEYS, [source, keys, self._allowed, passed_over]):
                rows = [row for row in page if passed_over or row["key"] not in self._sends]
                await self._send(self._partitions[source], rows)


async def _partitions(db: Connection[Row], consumer: str, wanted: Filter) -> dict[int, Partition]:
    rows = await db.fetch(SOURCES, consumer, wanted.topic, wanted.partition)
    return {row["source"]: Partition(row["topic"], row["partition"]) for row in rows}


async def _pages(db: Connection[Row], statement: str, arguments: Sequence[Any]) -> AsyncIterator[list[Row]]:
    """By (offset, key), never the same row twice."""
    after: tuple[int, UUID] = BEGINNING
    while page := await db.fetch(statement, *arguments, *after, PAGE_ROWS):
        yield page
        after = page[-1]["offset"], page[-1]["key"]


async def _heads(db: Connection[Row], keys: Iterable[tuple[int, bytes]]) -> dict[tuple[int, bytes], Row]:
    places = list(keys)
    rows = await db.fetch(HEADS, [source for source, _ in places], [key for _, key in places])
    return {(row["source"], row["parked_key"]): row for row in rows}


def _batched(keys: list[UUID], size: int) -> Iterator[list[UUID]]:
    return (keys[start : start + size] for start in range(0, len(keys), size))


def _chunks(rows: Sequence[Row], max_rows: int) -> Iterator[list[Row]]:
    chunk: list[Row] = []
    size = 0
    for row in rows:
        if chunk and (len(chunk) == max_rows or size + row["bytes"] > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row["bytes"]
    if chunk:
        yield chunk


def _report(
    key: UUID, delivered: dict[UUID, int], errors: list[KafkaError]
) -> Callable[[KafkaError | None, Any], None]:
    def report(error: KafkaError | None, message: Any) -> None:
        if error is None:
            delivered[key] = message.offset()
        else:
            errors.append(error)

    return report


def _explained(partition: Partition, error: KafkaError) -> str:
    hints = {
        KafkaError.MSG_SIZE_TOO_LARGE: "raise max.message.bytes of the topic",
        KafkaError.TOPIC_AUTHORIZATION_FAILED: "grant this user WRITE on the topic",
        KafkaError.CLUSTER_AUTHORIZATION_FAILED: "check this user's ACLs",
        KafkaError._MSG_TIMED_OUT: "are the brokers running?",  # noqa: SLF001
    }
    hint = hints.get(error.code())
    return f"sending to {partition} failed: {error.str()}" + (f"; {hint}" if hint else "")


def _event(event: dict[str, Any], at: datetime | None = None) -> str:
    at = at or datetime.now(UTC)
    return orjson.dumps({"at": at.isoformat(timespec="milliseconds"), **event}).decode()


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass


def _described(row: Row, partition: Partition) -> dict[str, Any]:
    error = orjson.loads(row["error"] or "{}")
    return {
        "id": row["message_id"],
        "status": row["status"],
        "type": row["type"],
        "topic": partition.topic,
        "partition": partition.number,
        "offset": row["offset"],
        "key": row["record_key"],
        "bytes": row["bytes"],
        "class": error.get("class"),
        "reason": error.get("reason"),
        "message": error.get("message"),
        "attempts": row["attempts"],
        "parked": row["parked_key"] is not None,
        "received_at": row["received_at"],
        "first_failed_at": row["first_failed_at"],
        "last_failed_at": row["finished_at"],
        "redriven_at": row["redriven_at"],
    }
