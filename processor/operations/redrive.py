"""Sends failed and parked messages again through their input topic, and follows what becomes of them.

A message goes to the partition it came from, its bytes unchanged, with a header that names its id; the service takes
over the row it finds there. Sending twice does no harm, but a row marked as sent without a record in Kafka would be
forgotten. So rows are marked after the delivery reports, and a redrive that dies in between is repeated.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Protocol
from uuid import UUID

from processor.errors import SetupError
from processor.kafka.sender import Letter, Sender
from processor.messages.decode import REDRIVE
from processor.operations import names
from processor.postgres import dead_letters, redrive
from processor.postgres.dead_letters import PAGE_ROWS, REPAIRABLE, Brief, Head, ParkedKey

if TYPE_CHECKING:
    from processor.messages.message import Partition
    from processor.postgres.dead_letters import Filter
    from processor.postgres.redrive import Scope
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

# Payloads are held, sent and marked in chunks.
CHUNK_ROWS = 500
CHUNK_BYTES = 8_388_608
POLL_SECONDS = (0.05, 1.0)
# The service takes a message at its turn, or passes over it. One that it passed over this often, though nothing is
# before it, would not be taken the next time either.
SENDS = 3


@dataclass(slots=True)
class Outcome:
    """How far a redrive got."""

    total: int = 0
    sent: int = 0
    followed: bool = False  # whether the counts below are known
    completed: int = 0
    parked: int = 0  # wait again
    left: int = 0  # the service has not come to them yet
    keys: int = 0
    keys_left: int = 0
    sent_before: int = 0  # match, and were not sent again
    collisions: int = 0  # match, and were left alone
    failed_again: list[str] = field(default_factory=list)
    held: list[str] = field(default_factory=list)  # collisions that keep a key parked
    elsewhere: list[str] = field(default_factory=list)  # messages of other partitions that keep a key parked
    passed_over: list[str] = field(default_factory=list)
    stalled: bool = False
    interrupted: bool = False

    @property
    def ok(self) -> bool:
        return not (self.failed_again or self.held or self.elsewhere or self.passed_over or self.stalled)


class Watcher(Protocol):
    """Hears how a redrive proceeds."""

    def begin(self, total: int) -> None:
        """This many messages are to be sent."""

    def sent(self, outcome: Outcome) -> None:
        """A chunk is in Kafka and marked."""

    def waiting(self, outcome: Outcome) -> None:
        """All is sent; some messages are not processed yet, or keys not free."""


async def plan(
    db: Connection, settings: Settings, wanted: Filter, *, again: bool = False, limit: int | None = None
) -> list[Scope]:
    """What a redrive would send, partition by partition. `limit` counts matches; a parked key is taken as a whole."""
    return await _plan(db, settings.consumer, await names.each_named(db, settings, wanted), again=again, limit=limit)


async def _plan(db: Connection, consumer: str, wanted: Filter, *, again: bool, limit: int | None) -> list[Scope]:
    scopes = []
    for partition_id, partition in (await dead_letters.partitions(db, consumer, wanted)).items():
        scope = await redrive.scope(db, consumer, wanted, partition_id, partition, again=again, limit=limit)
        if limit is not None:
            limit -= scope.matched
        if scope.total or scope.keys:
            scopes.append(scope)
    return scopes


async def to_send(db: Connection, scopes: Iterable[Scope]) -> AsyncIterator[tuple[Scope, list[Brief]]]:
    """The rows of a plan in pages, in order, without their payloads."""
    for scope in scopes:
        async for page in redrive.to_send(db, scope):
            yield scope, page


async def run(
    db: Connection,
    settings: Settings,
    wanted: Filter,
    *,
    again: bool,
    limit: int | None,
    rate: float | None,
    timeout_seconds: float | None,
    by: str,
    stop: asyncio.Event,
    watcher: Watcher,
) -> Outcome:
    """Plan and send.

    `timeout_seconds`: end waiting for the service when nothing has moved for this long; None: do not wait.
    """
    consumer = settings.consumer
    wanted = await names.each_named(db, settings, wanted)
    scopes = await _plan(db, consumer, wanted, again=again, limit=limit)
    partitions = await dead_letters.partitions(db, consumer, wanted)
    collisions = await redrive.collisions(db, consumer, wanted, partitions)
    if not scopes:
        sent_before = await redrive.sent_before(db, consumer, wanted, partitions)
        return Outcome(sent_before=sent_before, collisions=collisions)
    sender = Sender(settings.kafka, consumer, rate, stop)
    # Rows are marked together after at most a second of sending, however low the rate.
    chunk_rows = max(1, min(CHUNK_ROWS, int(rate))) if rate else CHUNK_ROWS
    doing = Redrive(db, sender, consumer, scopes, wanted.allowed(consumer), chunk_rows, by, stop, watcher)
    doing.outcome.collisions = collisions
    return await doing.run(timeout_seconds)


class Redrive:
    """Sends the messages of a plan and follows them; of parked keys it sends more until they are free."""

    def __init__(
        self,
        db: Connection,
        sender: Sender,
        consumer: str,
        scopes: Sequence[Scope],
        allowed: Sequence[str],
        chunk_rows: int,
        by: str,
        stop: asyncio.Event,
        watcher: Watcher,
    ) -> None:
        self._db = db
        self._sender = sender
        self._consumer = consumer
        self._scopes = scopes
        self._allowed = allowed  # inbox keys of collisions
        self._chunk_rows = chunk_rows
        self._by = by
        self._stop = stop
        self._watcher = watcher
        self._partitions = {scope.partition_id: scope.partition for scope in scopes}
        self._keys: set[ParkedKey] = {(scope.partition_id, key) for scope in scopes for key in scope.keys}
        self._sends: dict[UUID, int] = {}
        self._open: set[UUID] = set()  # sent, and the service has not come to them yet, as far as is known
        self._in_keys: set[UUID] = set()  # sent as messages of parked keys
        self.outcome = Outcome(total=sum(scope.total for scope in scopes), keys=len(self._keys))

    async def run(self, timeout_seconds: float | None) -> Outcome:
        self._watcher.begin(self.outcome.total)
        await self._sender.require(self._partitions.values())
        async for scope, page in to_send(self._db, self._scopes):
            await self._send(scope.partition, page)
            if self._stop.is_set():
                break
        if timeout_seconds is not None and not self._stop.is_set():
            await self._follow(timeout_seconds)
        self.outcome.keys_left = len(await dead_letters.heads(self._db, self._keys))
        self.outcome.interrupted = self._stop.is_set()
        return self.outcome

    async def _send(self, partition: Partition, page: Sequence[Brief]) -> None:
        for chunk in chunks(page, self._chunk_rows):
            if self._stop.is_set():
                return
            kept = await redrive.load(self._db, [row.key for row in chunk])
            letters = [
                Letter(one.key, one.record_key, one.payload, [*one.headers, self._named(one.message_id)])
                for one in kept
            ]
            sent_at = datetime.now(UTC)
            delivered, error = await self._sender.send(partition, letters)
            if arrived := [one for one in kept if one.key in delivered]:
                await redrive.mark(self._db, arrived, delivered, self._by, sent_at)
            self._sends |= {key: self._sends.get(key, 0) + 1 for key in delivered}
            in_keys = {row.key for row in chunk if row.parked_key is not None}
            self._in_keys |= in_keys & delivered.keys()
            self._open |= delivered.keys() - in_keys
            self.outcome.sent = len(self._sends)
            self._watcher.sent(self.outcome)
            if error:
                raise SetupError(f"{error}; {self.outcome.sent} sent and marked; run the command again for the rest")

    def _named(self, message_id: str) -> tuple[str, bytes]:
        return REDRIVE, f"{self._consumer}:{message_id}".encode()

    async def _follow(self, timeout_seconds: float) -> None:
        """Until the service has come to all that was sent, and every key is free or stuck."""
        keys = set(self._keys)
        seen: Any = None
        moved = time.monotonic()
        interval = POLL_SECONDS[0]
        while (keys or self._open) and not self._stop.is_set():
            positions = await redrive.positions(self._db, self._partitions)
            heads = await dead_letters.heads(self._db, keys)
            keys &= heads.keys()
            stuck, passed_over = self._judge(heads, keys)
            keys -= stuck
            await self._send_more(keys & passed_over, passed_over=True)
            await self._send_more(keys - passed_over, passed_over=False)
            touched = await self._settle() | {(head.key, head.version) for head in heads.values()}
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
        """Count the messages that the service is done with; returns the versions of the rows that are left."""
        left = set()
        open_ = list(self._open)
        for start in range(0, len(open_), PAGE_ROWS):
            keys = open_[start : start + PAGE_ROWS]
            states = await redrive.states(self._db, keys)
            for key in keys:
                state = states.get(key)
                waits = state is not None and state.redriven_at is not None and not state.passed_over
                if state is None or state.status == "completed":
                    self.outcome.completed += 1
                elif state.status == "failed" and state.redriven_at is None:
                    self.outcome.failed_again.append(state.message_id)
                elif state.status in REPAIRABLE and not waits:
                    if state.status == "parked" or key in self._in_keys:
                        self.outcome.parked += 1
                    else:
                        self.outcome.passed_over.append(state.message_id)
                elif state.status != "discarded":
                    left.add((key, state.version))
                    continue
                self._open.discard(key)
        return left

    def _judge(self, heads: dict[ParkedKey, Head], keys: set[ParkedKey]) -> tuple[set[ParkedKey], set[ParkedKey]]:
        """The keys that waiting cannot free, and those whose first message has to be sent again."""
        stuck, passed_over = set(), set()
        for place, head in heads.items():
            if head.home != place[0]:  # sent to the partition that has its row, or by nobody
                if (head.home, place[1]) not in keys:
                    if head.key not in self._sends:
                        self.outcome.elsewhere.append(head.message_id)
                    stuck.add(place)
                continue
            sends = self._sends.get(head.key, 0)
            if head.collided and head.key.hex not in self._allowed:
                self.outcome.held.append(head.message_id)
                stuck.add(place)
                continue
            if head.status not in REPAIRABLE or (head.redriven_at is not None and not head.passed_over):
                continue
            if sends and head.status == "failed" and head.redriven_at is None:
                stuck.add(place)
            elif sends >= SENDS:
                self.outcome.passed_over.append(head.message_id)
                stuck.add(place)
            else:
                passed_over.add(place)
        return stuck, passed_over

    async def _send_more(self, places: set[ParkedKey], *, passed_over: bool) -> None:
        """What has arrived since. A message that came before its turn is sent again only when its turn has come."""
        for partition_id in sorted({partition_id for partition_id, _ in places}):
            keys = [key for at, key in places if at == partition_id]
            async for page in redrive.of_keys(self._db, partition_id, keys, self._allowed, passed_over=passed_over):
                rows = [row for row in page if passed_over or row.key not in self._sends]
                await self._send(self._partitions[partition_id], rows)


def chunks(rows: Sequence[Brief], max_rows: int) -> Iterator[list[Brief]]:
    """In order, each of at most `max_rows` rows and `CHUNK_BYTES` bytes, unless a single row is larger."""
    chunk: list[Brief] = []
    size = 0
    for row in rows:
        if chunk and (len(chunk) == max_rows or size + row.bytes > CHUNK_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(row)
        size += row.bytes
    if chunk:
        yield chunk


async def _pause(stop: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await stop.wait()
    except TimeoutError:
        pass
