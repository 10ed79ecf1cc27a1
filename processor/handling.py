"""Runs the handlers of one batch on its one transaction, and gathers what they give.

In offset order, one after another; or, with `concurrency`, several at a time, and then the messages of one key
still one after another. Whatever ends a run ends it for the whole batch: the transaction is rolled back, and
the batch is run again without the message that was to blame, or in parts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Self

from processor import dispatch, outputs, sqlstates
from processor.blame import Again, Culprit, HandlerError
from processor.database import Database, Queue
from processor.errors import ProcessorError
from processor.failures import HandlerTimeout, Reject

if TYPE_CHECKING:
    from processor.config import Settings
    from processor.consumer import Assignment
    from processor.dispatch import Given, Route
    from processor.failures import Judge
    from processor.inbox import Claims
    from processor.outputs import Outgoing
    from processor.postgres import Session
    from processor.records import Record

# What Kafka adds to a record at most, besides key, value and headers.
OUTPUT_OVERHEAD = 512
DEFAULT_MESSAGE_MAX_BYTES = 1_000_000
# More than the headers of any output take that has none of its own.
STANDARD_HEADERS = 8_192


# Told which record of a partition is about to be handled, or None, where the process may not live to tell.
Mark = Callable[["Assignment", int | None], Awaitable[None]]


@dataclass(slots=True)
class Work:
    """What the handlers of one part gave."""

    outgoing: dict[Assignment, list[Outgoing]] = field(default_factory=dict)
    results: list[tuple[Record, str]] = field(default_factory=list)  # as JSON

    @property
    def topics(self) -> set[str]:
        return {output.topic for outgoing in self.outgoing.values() for output in outgoing}


class Handling:
    """One pass over the records of one part."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        judge: Judge,
        records: Sequence[Record],
        claims: Claims,
        *,
        careful: bool,
        mark: Mark | None,
    ) -> None:
        self._session = session
        self._mark = mark
        self._judge = judge
        # Where a failure has consequences for what comes after it, the batch is run again with it.
        self._fails_in_place = settings.failure.policy == "dead-letter"
        self._records = records
        self._claims = claims
        self._concurrency = 1 if mark else settings.concurrency
        self._idle_at_most = settings.database.idle_in_transaction_timeout_ms / 3000
        self._max_output = max_output(settings)
        self._queue = Queue(session.statements, self._refused if careful else None)
        self._serving: set[int] = set()
        self._work = Work()
        self._troubles: list[Exception] = []

    async def run(self) -> Work:
        """Raises HandlerError around whatever came out of a handler or its queued writes."""
        records = self._records
        ours = [index for index in self._claims.mine if records[index].failure is None and not records[index].parked]
        try:
            for route, indices in self._runs(ours):
                # A batch handler serves many keys at once: nothing queued later may overtake what it queues.
                self._queue.keep_order()
                if route is not None and self._mark is not None:
                    for index in indices:
                        await self._tell(records[index])
                        await self._many(route, [records[index]])
                elif route is not None:
                    await self._many(route, [records[index] for index in indices])
                elif self._concurrency == 1:
                    await self._lane(deque([indices]))
                else:
                    await self._lanes(indices)
                # The first to fail is the one to tell: the others only feel its broken transaction.
                for trouble in self._troubles:
                    raise trouble
            await self._queue.flush()
            await self._tell_end()
        except Exception as error:
            with suppress(ProcessorError):
                await self._tell_end()
            raise HandlerError from error
        finally:
            self._queue.close()
        return self._work

    async def _tell(self, record: Record) -> None:
        if self._mark is not None:
            await self._mark(record.assignment, record.message.offset)

    async def _tell_end(self) -> None:
        if self._mark is not None:
            for assignment in dict.fromkeys(map(_assignment, self._records)):
                await self._mark(assignment, None)

    def _runs(self, ours: list[int]) -> Iterable[tuple[Route | None, list[int]]]:
        """Records that are handled together: those for the same batch handler, or for any of the others (None)."""

        def batch_route(index: int) -> Route | None:
            route = _route(self._records[index])
            return route if route.takes_batch else None

        if ours and len({self._records[index].route for index in ours}) == 1:  # as nearly always
            return [(batch_route(ours[0]), ours)]
        return [(route, list(run)) for route, run in groupby(ours, key=batch_route)]

    async def _many(self, route: Route, records: list[Record]) -> None:
        database = Database(self._queue)
        database.serve(route)
        with Watch() as watch:
            value = await watch.call(route, [record.message for record in records], database)
        self._queue.raise_failure()
        self._collect(dispatch.given_for_batch(records, value))

    async def _lanes(self, indices: Sequence[int]) -> None:
        """Up to `concurrency` handlers at a time, each key in one lane only; messages without a key in any."""
        by_key: dict[object, list[int]] = {}
        for index in indices:
            message = self._records[index].message
            key = index if message.key is None else (message.topic, message.partition, message.key)
            by_key.setdefault(key, []).append(index)
        waiting = deque(by_key.values())
        lanes = [asyncio.create_task(self._lane(waiting)) for _ in range(min(self._concurrency, len(waiting)))]
        try:
            await asyncio.wait(lanes)
        finally:
            for lane in lanes:
                lane.cancel()
        for outgoing in self._work.outgoing.values():
            outgoing.sort(key=attrgetter("source_offset", "place"))

    async def _lane(self, waiting: deque[list[int]]) -> None:
        """Take keys from those that wait until there are none, or until somebody is in trouble."""
        database = Database(self._queue)
        with Watch() as watch:
            while waiting:
                for index in waiting.popleft():
                    if self._troubles:
                        return
                    try:
                        await self._one(index, database, watch)
                    except Exception as error:
                        self._troubles.append(error)

    async def _one(self, index: int, database: Database, watch: Watch) -> None:
        """Run one handler. Raises Culprit if the message is to blame and the batch cannot go on as it is."""
        record = self._records[index]
        route, message = _route(record), record.message
        if route.effect and record.effect is None:
            raise Again(f"{record.coordinates}: became free only now")
        if database.quiet_for() > self._idle_at_most:
            await database.stay_awake()
        database.serve(record if message.key is None else (message.partition, message.key), index)
        self._serving.add(index)
        if self._mark is not None:
            await self._tell(record)
        try:
            if record.effect is not None:
                value = record.effect.apply(database)
            else:
                value = await watch.call(route, message, database)
            self._queue.raise_failure()
            self._collect(dispatch.given_for_one(record, value))
        except Exception as error:
            self._queue.raise_failure()
            if (
                isinstance(error, ProcessorError | Culprit)
                or self._session.broken(error)
                or sqlstates.is_bystander(error)
            ):
                raise
            self._fail(index, error, database.withdraw)
        finally:
            self._serving.discard(index)

    def _refused(self, index: int, error: Exception) -> None:
        """A write that this message queued is refused: it fails, with all else that it gave."""
        if index in self._serving:  # nobody knows what it is going to do yet
            raise Culprit(index, error) from error
        self._fail(index, error, lambda: self._queue.withdraw(index))
        record, work = self._records[index], self._work
        if record.assignment in work.outgoing:
            work.outgoing[record.assignment] = [
                output for output in work.outgoing[record.assignment] if output.source_offset != record.message.offset
            ]
        work.results = [(one, result) for one, result in work.results if one is not record]

    def _fail(self, index: int, error: Exception, withdraw: Callable[[], bool]) -> None:
        """Let the message fail and the batch go on; Culprit if that cannot be.

        It can, if it fails for good and what it queued can be taken back; not if the same message comes again in
        this batch: the later delivery is to get its try.
        """
        failure = self._judge.verdict(self._records[index], error)
        if failure is None or not self._fails_in_place or index in self._claims.repeated or not withdraw():
            raise Culprit(index, error) from error
        self._records[index].failure = failure

    def _collect(self, given: Given) -> None:
        """Encode what a handler gave. What Kafka would refuse is refused now: later there is no way back."""
        results = [(record, outputs.dump_json(result).decode()) for record, result in given.results]
        encoded: list[Outgoing] = []
        if len(given.outputs) == 1:
            encoded = [outputs.encode(given.outputs[0], given.causes[0], given.places[0])]
        elif given.outputs:
            encoded = outputs.encode_all(given.outputs, given.causes, given.places)
        self._refuse_oversized(encoded)
        self._work.results += results
        start = 0
        for assignment, run in groupby(map(_assignment, given.causes)):
            end = start + sum(1 for _ in run)
            share = encoded[start:end]
            if assignment.silent_below:
                share = [output for output in share if output.source_offset >= assignment.silent_below]
            self._work.outgoing.setdefault(assignment, []).extend(share)
            start = end

    def _refuse_oversized(self, encoded: list[Outgoing]) -> None:
        most = self._max_output
        suspicious = most - STANDARD_HEADERS
        for output in encoded:
            _, _, key, value, _, _, _, extra = output
            if len(value or b"") + len(key or b"") > suspicious or extra:
                size = output.size()
                if size > most:
                    raise Reject(f"output to {output.topic} has {size} bytes, {most} at most")


_assignment = attrgetter("assignment")


def _route(record: Record) -> Route:
    assert record.route is not None
    return record.route


def max_output(settings: Settings) -> int:
    """The bytes that a record may have for the producer to take it."""
    most = settings.kafka.producer.get("message.max.bytes", DEFAULT_MESSAGE_MAX_BYTES)
    return int(most) - OUTPUT_OVERHEAD  # type: ignore[arg-type]


class Watch:
    """Ends handlers that take too long, with one timer for all calls of a task: one for each would be dear."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._deadline: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expired = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def call(self, route: Route, argument: Any, database: Any) -> Any:
        """A handler's answer. That something inside it was cancelled is its failure, unless it was us who did it."""
        self._expired = False
        self._deadline = self._loop.time() + route.timeout_seconds
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._look)
        try:
            value = await route.handler(argument, database)
        except asyncio.CancelledError as error:
            if self._expired and self._task.uncancel() == 0:
                raise HandlerTimeout(f"{route.name} took longer than {route.timeout_seconds:g} s") from None
            if self._task.cancelling():
                raise
            raise RuntimeError("the handler let a cancellation through") from error
        finally:
            self._deadline = None
        if self._expired:  # it went on regardless, and came to its end
            self._task.uncancel()
        return value

    def _look(self) -> None:
        self._timer = None
        if self._deadline is None:
            return
        if self._loop.time() >= self._deadline:
            self._expired = True
            self._task.cancel()
        else:
            self._timer = self._loop.call_at(self._deadline, self._look)
