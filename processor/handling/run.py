"""Runs the handlers of one batch on its one transaction.

Handlers run in offset order, one after another. With `concurrency` several run at a time, but the messages of one key
still run one after another. An error that ends the run ends it for the whole batch: the transaction is rolled back,
and the batch is run again without the message at fault, or in parts.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

from processor.errors import ProcessorError
from processor.handling.database import Awake, Database
from processor.handling.errors import HandlerError, NotYet, OutOfTurn
from processor.handling.queue import Queue, QueuedWriteFailed
from processor.handling.reads import GatheringDatabase, Reads
from processor.handling.result import BatchResult, Gatherer, max_output
from processor.handling.timeouts import HandlerTimedOut, HandlerTimeout, described
from processor.messages.message import Messages, Output
from processor.postgres import sqlstates

if TYPE_CHECKING:
    from processor.handling.effects import Effect
    from processor.handling.registry import Route, Routes
    from processor.messages.batch import Batch
    from processor.messages.failure import Failure
    from processor.messages.message import Message, Partition
    from processor.messages.record import Record
    from processor.observe.stalls import Stalls
    from processor.postgres.claims import Claims
    from processor.postgres.session import Session
    from processor.settings.schema import Settings

# Returns the final failure of a message whose handler raised this error; None if the message is to be tried again.
FinalFailure = Callable[["Record", Exception], "Failure | None"]


class Marker(Protocol):
    """Marks the records in progress in the database, where the mark outlives a process that they kill."""

    def pieces(self, records: Sequence[Record], indices: Sequence[int]) -> Iterable[Sequence[int]]:
        """Split the records into pieces that are marked one after another."""

    async def mark(self, first: Record, last: Record) -> None:
        """Mark these, and those between them, as in progress."""

    async def end(self) -> None:
        """Remove the mark: no record is in progress any more."""


class BatchRun:
    """One pass over the records of one batch, or of a part of it."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        routes: Routes,
        final_failure: FinalFailure,
        batch: Batch,
        claims: Claims,
        *,
        effect_of: Callable[[Record], Effect | None],
        silent_below: Mapping[Partition, int],
        careful: Collection[str],
        marker: Marker | None,
        stalls: Stalls,
    ) -> None:
        self._session = session
        self._routes = routes
        self._final_failure = final_failure
        # Under the other policies a failure affects later records, so the batch is run again with the failure known.
        self._fails_in_place = settings.failure.policy == "dead-letter"
        self._stalls = stalls
        self._marker = marker
        self._batch = batch
        self._claims = claims
        self._effect_of = effect_of
        # In columns only if every record is ours to handle and none has to be marked.
        self._columns = batch.columns if len(claims.mine) == len(batch) and marker is None else None
        self._rows: Sequence[Record] = () if self._columns is not None else batch.as_rows()
        self._messages: list[Message[Any]] = []
        self._concurrency = 1 if marker else settings.concurrency
        self._idle_at_most = settings.database.idle_seconds
        self._queue = Queue(session.statements, self._refused, careful)
        self._gatherer = Gatherer(batch, silent_below, max_output(settings), self._fail_after_all)
        self._careful = careful  # statements that are sent so that an error shows its message
        self._left_out: set[int] = set()  # messages that failed after their handler had returned
        self._serving: set[int] = set()
        self._troubles: list[Exception] = []

    async def run(self) -> BatchResult:
        """Call the handlers. Raises HandlerError around an error of a handler, or of a write that it queued."""
        async with self._marking():
            try:
                async with Awake(self._queue, self._idle_at_most):
                    for route, indices in self._runs():
                        self._gatherer.encode()  # outputs keep the order of the runs
                        # A batch handler serves many keys at once: later writes must not overtake the ones it queues.
                        self._queue.keep_order()
                        for piece in self._pieces(indices):
                            await self._mark(piece)
                            await self._handle(route, piece)
                await self._flush_and_encode()
            finally:
                self._queue.close()
                self._gatherer.close()
        if self._left_out:
            rows = self._batch.as_rows()
            self._gatherer.result.leave_out([rows[index] for index in self._left_out])
        return self._gatherer.result

    async def _flush_and_encode(self) -> None:
        """Encode outputs while Postgres works on the queued writes: neither needs the other."""
        flushing = asyncio.create_task(self._queue.flush())
        try:
            # uvloop writes at the end of an iteration: the first one queues the statement, the second one has it sent.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self._gatherer.encode()
            self._gatherer.result.pack()
        finally:
            await flushing

    @asynccontextmanager
    async def _marking(self) -> AsyncIterator[None]:
        """Remove the mark at the end, and turn a handler's error into HandlerError."""
        try:
            yield
            if self._marker is not None:
                await self._marker.end()
        except Exception as error:
            if self._marker is not None:
                with suppress(ProcessorError):
                    await self._marker.end()
            if isinstance(error, HandlerError | NotYet | ProcessorError):
                raise
            raise HandlerError(error) from error

    async def _handle(self, route: Route | None, indices: Sequence[int]) -> None:
        if route is not None:
            await self._call_with_many(route, indices)
            return
        self._messages = self._messages or self._batch.messages()
        if self._concurrency == 1:
            await self._lane(deque([indices]), Database(self._queue))
        else:
            await self._lanes(indices)
        # Report the first failure: the others only hit the transaction that it broke, or waited for it.
        for trouble in sorted(self._troubles, key=lambda trouble: isinstance(trouble, OutOfTurn)):
            raise trouble

    def _pieces(self, indices: Sequence[int]) -> Iterable[Sequence[int]]:
        """Return all in one piece, unless the records in progress have to be marked."""
        return [indices] if self._marker is None else self._marker.pieces(self._rows, indices)

    def _runs(self) -> Iterable[tuple[Route | None, Sequence[int]]]:
        """Return runs of records: those for one batch handler, or for any handlers of single messages (None)."""
        if self._columns is not None:
            route = self._routes.of(self._columns.message_type)
            return [(route if route.takes_batch else None, range(len(self._batch)))]
        rows = self._rows

        def batch_route(index: int) -> Route | None:
            route = self._route(rows[index])
            return route if route.takes_batch else None

        ours = [index for index in self._claims.mine if rows[index].failure is None and not rows[index].parked]
        return [(route, list(run)) for route, run in groupby(ours, key=batch_route)]

    def _route(self, record: Record) -> Route:
        assert record.message_type is not None
        return self._routes.of(record.message_type)

    # --- handlers of a batch ---

    async def _call_with_many(self, route: Route, indices: Sequence[int]) -> None:
        database = Database(self._queue)
        database.serve(route)
        columns = self._columns
        messages = columns.messages if columns is not None else lambda: [self._rows[at].message for at in indices]
        argument: Any
        if not route.by_column:
            argument = messages()
        elif columns is not None:
            argument = Messages(len(columns), columns.column, messages)
        else:
            argument = Messages.of(messages())
        with HandlerTimeout(self._stalls, lambda: f"{len(indices)} messages") as timeout:
            value = await timeout.call(route, argument, database)
        database.serve(None)
        self._queue.raise_failure()
        self._gatherer.take(route, indices, argument, value)

    # --- handlers of one message ---

    async def _lanes(self, indices: Sequence[int]) -> None:
        """Run up to `concurrency` handlers at a time, each key in one lane only, messages without a key in any."""
        by_key: dict[object, list[int]] = {}
        for index in indices:
            message = self._messages[index]
            key = index if message.key is None else (message.topic, message.partition, message.key)
            by_key.setdefault(key, []).append(index)
        waiting: deque[Sequence[int]] = deque(by_key.values())
        reads = Reads(self._queue, alone=self._careful)
        databases = [GatheringDatabase(self._queue, reads) for _ in range(min(self._concurrency, len(waiting)))]
        lanes = [asyncio.create_task(self._lane(waiting, database)) for database in databases]
        try:
            await asyncio.wait(lanes)
            await reads.end()
        finally:
            for lane in lanes:
                lane.cancel()
        self._gatherer.sort()

    async def _lane(self, waiting: deque[Sequence[int]], database: Database) -> None:
        """Take waiting keys one by one until there are none, or until some lane has failed."""
        with HandlerTimeout(self._stalls, lambda: self._described(database.owner)) as limit:
            while waiting:
                try:
                    await self._one_by_one(waiting.popleft(), database, limit)
                except Exception as error:
                    self._troubles.append(error)
        database.serve(None)

    async def _one_by_one(self, indices: Sequence[int], database: Database, limit: HandlerTimeout) -> None:
        """Run the handlers of these. Raises HandlerError, with the message at fault, if the batch cannot go on."""
        queue, messages, idle_at_most = self._queue, self._messages, self._idle_at_most
        route_of_all = None if self._columns is None else self._routes.of(self._columns.message_type)
        give, answer = self._gatherer.outputs.append, self._gatherer.answered.append
        begin, serve = limit.begin, database.serve
        for index in indices:
            if self._troubles:
                return
            message = messages[index]
            route, effect = route_of_all, None
            if route is None:
                record = self._rows[index]
                route = self._route(record)
                if record.acts and (effect := self._effect_of(record)) is None:
                    raise NotYet(f"{record.coordinates}: another instance released it only now")
            if begin(route) - queue.last_sent > idle_at_most:
                limit.end()
                await database.stay_awake()
                begin(route)
            key = message.key
            serve(message if key is None else (message.partition, key), index)
            if self._careful:
                self._serving.add(index)
            try:
                if effect is not None:
                    value = effect.apply(database)
                else:
                    try:  # as `call` does, without another coroutine for each message
                        value = await route.handler(message, database)
                    except Exception:
                        raise
                    except BaseException as error:
                        limit.explain(route, error)
                        raise
                    finally:
                        if limit.expired:
                            limit.end()
                queue.raise_failure()
                if type(value) is Output:
                    give(value)
                    answer(index)
                elif value is not None:
                    self._gatherer.take_one(route, index, value)
            except Exception as error:
                queue.raise_failure()
                if (
                    isinstance(error, ProcessorError | HandlerError)
                    or self._session.broken(error)
                    or sqlstates.is_bystander(error)
                ):
                    raise
                if database.waits_for_turn and isinstance(error, HandlerTimedOut):
                    raise OutOfTurn(error) from error
                self._fail(index, error)
            finally:
                if self._careful:
                    self._serving.discard(index)

    async def _mark(self, piece: Sequence[int]) -> None:
        if self._marker is not None:
            await self._marker.mark(self._rows[piece[0]], self._rows[piece[-1]])

    def _described(self, index: int | None) -> str:
        """Describe a message for people."""
        return "nothing" if index is None else described(self._messages[index])

    # --- messages that fail ---

    def _fail(self, index: int, error: Exception) -> None:
        """Let the message fail and the batch go on; raise HandlerError if that is not possible.

        It is possible if the message fails for good and its queued writes can be withdrawn. It is not if the same
        message comes again in this batch, because the later delivery must get its own try.
        """
        record = self._batch.as_rows()[index]
        failure = self._final_failure(record, error)
        in_place = failure is not None and self._fails_in_place and index not in self._claims.repeated
        if not in_place or not self._queue.withdraw(index):
            raise HandlerError(error, index) from error
        record.failure = failure

    def _fail_after_all(self, index: int, error: Exception) -> None:
        """Let a message fail whose handler has returned: its outputs and results are left out."""
        self._fail(index, error)
        self._left_out.add(index)

    def _refused(self, index: int, error: QueuedWriteFailed) -> None:
        """Let a message fail whose queued write Postgres refuses; none of its outputs and writes count."""
        self._gatherer.result.refused.add(error.what)
        if index in self._serving:  # its handler is still running and may do more
            raise HandlerError(error, index) from error
        self._fail_after_all(index, error)
