"""Runs the handlers of one batch on its one transaction, and gathers what they give.

In offset order, one after another; or, with `concurrency`, several at a time, and then the messages of one key
still one after another. Whatever ends a run ends it for the whole batch: the transaction is rolled back, and
the batch is run again without the message that was to blame, or in parts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from processor import dispatch, failures, outputs
from processor.database import Database, Queue
from processor.errors import ProcessorError
from processor.failures import Culprit, HandlerError, Later, Reject, Retry

if TYPE_CHECKING:
    from processor.config import Settings
    from processor.consumer import Assignment
    from processor.dispatch import Given, Route
    from processor.inbox import Claims
    from processor.outputs import Outgoing
    from processor.postgres import Session
    from processor.records import Failure, Record

# What Kafka adds to a record at most, besides key, value and headers.
OUTPUT_OVERHEAD = 512
DEFAULT_MESSAGE_MAX_BYTES = 1_000_000
# More than the headers of any output take that has none of its own.
STANDARD_HEADERS = 8_192


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

    def __init__(self, settings: Settings, session: Session, records: Sequence[Record], claims: Claims) -> None:
        self._session = session
        self._records = records
        self._claims = claims
        self._concurrency = settings.concurrency
        self._idle_at_most = settings.database.idle_in_transaction_timeout_ms / 3000
        most = int(settings.kafka.producer.get("message.max.bytes", DEFAULT_MESSAGE_MAX_BYTES))  # type: ignore[arg-type]
        self._max_output = most - OUTPUT_OVERHEAD
        self._queue = Queue(session.statements)
        self._work = Work()
        self._troubles: list[Exception] = []

    async def run(self) -> Work:
        """Raises HandlerError around whatever came out of a handler or its queued writes."""
        records = self._records
        ours = [index for index in self._claims.mine if records[index].failure is None]
        try:
            for route, indices in self._runs(ours):
                # A batch handler serves many keys at once: nothing queued later may overtake what it queues.
                self._queue.keep_order()
                if route is not None:
                    await self._many(route, [records[index] for index in indices])
                elif self._concurrency == 1:
                    await self._lane(deque([indices]))
                else:
                    await self._lanes(indices)
                # The first to fail is the one to tell: the others only feel its broken transaction.
                for trouble in self._troubles:
                    raise trouble
            await self._queue.flush()
        except Exception as error:
            raise HandlerError from error
        finally:
            self._queue.close()
        return self._work

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
        value = await _called(route.handler([record.message for record in records], database))
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
        while waiting:
            for index in waiting.popleft():
                if self._troubles:
                    return
                try:
                    failure = await self._one(index, database)
                    if failure is not None:
                        self._fail(index, failure, database)
                except Exception as error:
                    self._troubles.append(error)

    def _fail(self, index: int, failure: Failure, database: Database) -> None:
        # What it only queued can be taken back; but if the same message comes again in this batch, the
        # batch is run again in two parts, so that the later delivery gets its try.
        if index in self._claims.repeated or not database.withdraw():
            raise Culprit(index, failure)
        self._records[index].failure = failure

    async def _one(self, index: int, database: Database) -> Failure | None:
        """Run one handler; gives the failure if the message is to blame, raises if it is not or not surely."""
        record = self._records[index]
        route, message = _route(record), record.message
        if database.quiet_for() > self._idle_at_most:
            await database.stay_awake()
        database.serve(record if message.key is None else (message.partition, message.key))
        try:
            value = await _called(route.handler(message, database))
            self._queue.raise_failure()
            self._collect(dispatch.given_for_one(record, value))
        except Retry as retry:
            record.retries += 1
            if record.retries > failures.RETRIES:
                return failures.failure_of(retry)
            raise Later(f"{route.name}: {retry}", retry.after, index) from retry
        except Exception as error:
            self._queue.raise_failure()
            if isinstance(error, ProcessorError) or self._session.broken(error):
                raise
            if not failures.blames_the_message(error):
                raise
            return failures.failure_of(error)
        return None

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


async def _called(handler: Awaitable[Any]) -> Any:
    """A handler's answer. That something inside it was cancelled is its failure, unless it was us who did it."""
    try:
        return await handler
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError("the handler let a cancellation through") from error
