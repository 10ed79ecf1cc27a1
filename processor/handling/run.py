"""Runs the handlers of one batch on its one transaction, and gathers what they give.

In offset order, one after another; or, with `concurrency`, several at a time, and then the messages of one key
still one after another. Whatever ends a run ends it for the whole batch: the transaction is rolled back, and
the batch is run again without the message that was to blame, or in parts.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from processor.errors import ProcessorError, Reject
from processor.handling import registry
from processor.handling.database import Awake, Database
from processor.handling.queue import Queue, QueuedWriteFailed
from processor.handling.timeouts import HandlerTimeout, described
from processor.messages import outputs, stored
from processor.messages.batch import assignments_of, messages_of, stretches_of, usual
from processor.messages.message import Messages, Output, Outputs
from processor.messages.outcomes import Again, Culprit, HandlerError
from processor.messages.outputs import Causes
from processor.postgres import sqlstates

if TYPE_CHECKING:
    from processor.engine.failing.classify import Judge
    from processor.handling.registry import Route
    from processor.kafka.assignment import Assignment
    from processor.messages.message import Message
    from processor.messages.outputs import EncodedOutputs
    from processor.messages.record import Record
    from processor.observe.stalls import Stalls
    from processor.postgres.inbox import Claims
    from processor.postgres.session import Session
    from processor.settings.schema import Settings

# What Kafka adds to a record at most, besides key, value and headers.
OUTPUT_OVERHEAD = 512
DEFAULT_MESSAGE_MAX_BYTES = 1_000_000
# More than the headers of any output take that has none of its own.
STANDARD_HEADERS = 8_192


# Told which records of a partition are about to be handled, or None, where the process may not live to tell.
Mark = Callable[["Assignment", range | None], Awaitable[None]]
# Of so many at a time it is told: about as many pieces in the largest batch as records in a piece. When a process has
# died of a piece, of each of its records.
PIECE = 64


@dataclass(slots=True)
class BatchResult:
    """What the handlers of one part gave."""

    outgoing: dict[Assignment, EncodedOutputs] = field(default_factory=dict)
    results: list[tuple[Record, str]] = field(default_factory=list)  # as JSON
    refused: set[str] = field(default_factory=set)  # statements of which Postgres has refused a write
    _packed: dict[Assignment, tuple[EncodedOutputs, bytes | None]] = field(default_factory=dict)

    @property
    def topics(self) -> set[str]:
        return {topic for parcel in self.outgoing.values() for topic in set(parcel.topics)}

    def sent_to(self, topics: Collection[str]) -> dict[tuple[Assignment, int], str]:
        """Who sends to these: partition and offset of records that are answered there."""
        return {
            (assignment, offset): topic
            for assignment, parcel in self.outgoing.items()
            for offset, topic in zip(parcel.offsets, parcel.topics, strict=True)
            if topic in topics
        }

    def add(self, assignment: Assignment, parcel: EncodedOutputs) -> None:
        self._packed.pop(assignment, None)
        if assignment in self.outgoing:
            self.outgoing[assignment].extend(parcel)
        else:
            self.outgoing[assignment] = parcel

    def pack(self) -> None:
        """Make what is going to be stored of these now, unless something changes in the meantime."""
        for assignment, parcel in self.outgoing.items():
            self._packed[assignment] = parcel, stored.pack(parcel)

    def packed(self, assignment: Assignment) -> bytes | None:
        """What is stored of a partition's outputs; None if there are none."""
        parcel = self.outgoing.get(assignment)
        if parcel is None:
            return None
        of, blob = self._packed.get(assignment, (None, None))
        return blob if of is parcel else stored.pack(parcel)


class BatchRun:
    """One pass over the records of one part."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        judge: Judge,
        records: Sequence[Record],
        claims: Claims,
        *,
        careful: Collection[str],
        mark: Mark | None,
        meanwhile: Callable[[], None],
        stalls: Stalls,
    ) -> None:
        self._session = session
        self._stalls = stalls
        self._mark = mark
        self._meanwhile: Callable[[], None] | None = meanwhile  # called once, while Postgres is at something
        self._told: Assignment | None = None  # whose records were told to be at work
        self._judge = judge
        # Where a failure has consequences for what comes after it, the batch is run again with it.
        self._fails_in_place = settings.failure.policy == "dead-letter"
        self._records = records if usual(records) is not None else list(records)
        self._claims = claims
        # Columns for all of them, as long as nobody is left out and nobody needs to be told of one by one.
        self._bulk = usual(records) if len(claims.mine) == len(records) and mark is None else None
        self._messages: list[Message[Any]] = []
        self._concurrency = 1 if mark else settings.concurrency
        self._idle_at_most = settings.database.idle_seconds
        self._max_output = max_output(settings)
        self._queue = Queue(session.statements, self._refused, careful)
        self._careful = bool(careful)
        self._left_out: set[int] = set()
        self._serving: set[int] = set()
        self._stretches = stretches_of(records)
        self._causes: Causes | None = None
        self._outputs: list[Output] = []  # of handlers of one message, and which one each answers
        self._where: list[int] = []
        self._given: list[tuple[Route, Sequence[int], Any, Any]] = []  # by batch handlers, for which messages
        self._work = BatchResult()
        self._troubles: list[Exception] = []

    async def run(self) -> None:
        """Call the handlers. Raises HandlerError around whatever came out of one or its queued writes."""
        when_waiting = asyncio.get_running_loop().call_soon(self._use_the_time)
        async with self._telling():
            try:
                async with Awake(self._queue, self._idle_at_most):
                    for route, indices in self._runs():
                        self._encode()  # before anything that comes later
                        # A batch handler serves many keys at once: nothing queued later may overtake what it queues.
                        self._queue.keep_order()
                        for piece in self._pieces(indices):
                            await self._tell(piece)
                            await self._handle(route, piece)
                when_waiting.cancel()
                await self._flush_and_encode()
            finally:
                when_waiting.cancel()
                self._queue.close()

    def _use_the_time(self) -> None:
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()

    async def _flush_and_encode(self) -> None:
        """While Postgres is at what was queued, what handlers gave is encoded: neither needs the other."""
        flushing = asyncio.create_task(self._queue.flush())
        try:
            await asyncio.sleep(0)  # the first statement goes out now
            self._use_the_time()
            await asyncio.sleep(0)
            self._encode()
            self._work.pack()
        finally:
            await flushing

    async def work(self) -> BatchResult:
        """What came of it, encoded."""
        async with self._telling():
            if self._left_out:
                self._leave_out()
            await self._tell_end()
        return self._work

    @asynccontextmanager
    async def _telling(self) -> AsyncIterator[None]:
        try:
            yield
        except Exception as error:
            with suppress(ProcessorError):
                await self._tell_end()
            raise HandlerError from error

    async def _handle(self, route: Route | None, indices: Sequence[int]) -> None:
        if route is not None:
            await self._many(route, indices)
            return
        self._messages = self._messages or messages_of(self._records)
        await (self._lane(deque([indices])) if self._concurrency == 1 else self._lanes(indices))
        # The first to fail is the one to tell: the others only feel its broken transaction.
        for trouble in self._troubles:
            raise trouble

    def _pieces(self, indices: Sequence[int]) -> Iterable[Sequence[int]]:
        """All at once; with caution, neighbours of one partition, and those that an owner has died of one by one."""
        if self._mark is None:
            yield indices
            return
        piece: list[int] = []
        for index in indices:
            record = self._records[index]
            suspect = record.assignment.suspect
            alone = suspect is not None and record.message.offset in suspect
            if piece and (alone or len(piece) == PIECE or self._records[piece[-1]].assignment is not record.assignment):
                yield piece
                piece = []
            piece.append(index)
            if alone:
                yield piece
                piece = []
        if piece:
            yield piece

    async def _tell(self, piece: Sequence[int]) -> None:
        if self._mark is not None:
            first, last = self._records[piece[0]], self._records[piece[-1]]
            if first.assignment is not self._told:
                await self._tell_end()  # nobody is to be suspected of what happens in another partition
            self._told = first.assignment
            await self._mark(first.assignment, range(first.message.offset, last.message.offset + 1))

    async def _tell_end(self) -> None:
        if self._mark is not None and self._told is not None:
            await self._mark(self._told, None)

    def _runs(self) -> Iterable[tuple[Route | None, Sequence[int]]]:
        """Records that are handled together: those for the same batch handler, or for any of the others (None)."""
        if self._bulk is not None:
            route = self._bulk.route
            return [(route if route.takes_batch else None, range(len(self._records)))]
        records = self._records

        def batch_route(index: int) -> Route | None:
            route = _route(records[index])
            return route if route.takes_batch else None

        ours = [index for index in self._claims.mine if records[index].failure is None and not records[index].parked]
        return [(route, list(run)) for route, run in groupby(ours, key=batch_route)]

    async def _many(self, route: Route, indices: Sequence[int]) -> None:
        database = Database(self._queue)
        database.serve(route)
        bulk = self._bulk
        messages = bulk.messages if bulk is not None else lambda: [self._records[index].message for index in indices]
        argument: Any
        if not route.by_column:
            argument = messages()
        elif bulk is not None:
            argument = Messages(len(bulk), bulk.column, messages)
        else:
            argument = Messages.of(messages())
        with HandlerTimeout(self._stalls, lambda: f"{len(indices)} messages") as watch:
            value = await watch.call(route, argument, database)
        database.serve(None)
        self._queue.raise_failure()
        self._given.append((route, indices, argument, value))

    def _encode(self) -> None:
        """What handlers gave since the last time: those of a batch, or those of one message each."""
        given, self._given = self._given, []
        for route, indices, argument, value in given:
            self._take(route, indices, argument, value)
        if self._outputs:
            self._collect()

    def _take(self, route: Route, indices: Sequence[int], argument: Any, value: Any) -> None:
        if isinstance(value, Outputs):
            parcel = outputs.encode_each(value, self._known_causes(), indices)
            self._refuse_oversized(parcel)
            self._add(indices, parcel)
            return
        given = registry.given_for_batch(route.name, argument, value)
        self._keep_results([(indices[index], result) for index, result in given.results])
        where = indices if isinstance(given.where, range) else [indices[index] for index in given.where]
        self._add(where, self._encoded(given.outputs, where, given.places))

    async def _lanes(self, indices: Sequence[int]) -> None:
        """Up to `concurrency` handlers at a time, each key in one lane only; messages without a key in any."""
        by_key: dict[object, list[int]] = {}
        for index in indices:
            message = self._messages[index]
            key = index if message.key is None else (message.topic, message.partition, message.key)
            by_key.setdefault(key, []).append(index)
        waiting: deque[Sequence[int]] = deque(by_key.values())
        lanes = [asyncio.create_task(self._lane(waiting)) for _ in range(min(self._concurrency, len(waiting)))]
        try:
            await asyncio.wait(lanes)
        finally:
            for lane in lanes:
                lane.cancel()
        order = sorted(range(len(self._where)), key=self._where.__getitem__)  # those of one message stay as they are
        self._outputs = [self._outputs[at] for at in order]
        self._where.sort()

    async def _lane(self, waiting: deque[Sequence[int]]) -> None:
        """Take keys from those that wait until there are none, or until somebody is in trouble."""
        database = Database(self._queue)
        with HandlerTimeout(self._stalls, lambda: self._described(database.owner)) as watch:
            while waiting:
                try:
                    await self._one_by_one(waiting.popleft(), database, watch)
                except Exception as error:
                    self._troubles.append(error)
        database.serve(None)

    async def _one_by_one(self, indices: Sequence[int], database: Database, watch: HandlerTimeout) -> None:
        """Run the handlers of these. Raises Culprit if a message is to blame and the batch cannot go on as it is."""
        queue, messages, idle_at_most = self._queue, self._messages, self._idle_at_most
        route_of_all = None if self._bulk is None else self._bulk.route
        give, answers, begin, serve = self._outputs.append, self._where.append, watch.begin, database.serve
        for index in indices:
            if self._troubles:
                return
            message = messages[index]
            route, effect = route_of_all, None
            if route is None:
                record = self._records[index]
                route, effect = _route(record), record.effect
                if route.effect and effect is None:
                    raise Again(f"{record.coordinates}: became free only now")
            if begin(route) - queue.last_sent > idle_at_most:
                watch.end()
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
                    try:  # what `call` does, without a coroutine more for each message
                        value = await route.handler(message, database)
                    except Exception:
                        raise
                    except BaseException as error:
                        watch.explain(route, error)
                        raise
                    finally:
                        if watch.expired:
                            watch.end()
                queue.raise_failure()
                if type(value) is Output:
                    give(value)
                    answers(index)
                elif value is not None:
                    self._take_one(route, index, value)
            except Exception as error:
                queue.raise_failure()
                if (
                    isinstance(error, ProcessorError | Culprit)
                    or self._session.broken(error)
                    or sqlstates.is_bystander(error)
                ):
                    raise
                self._fail(index, error)
            finally:
                if self._careful:
                    self._serving.discard(index)

    def _described(self, index: int | None) -> str:
        """For people."""
        return "nothing" if index is None else described(self._messages[index])

    def _take_one(self, route: Route, index: int, value: Any) -> None:
        """Keep what the handler of one message gave besides a single output."""
        given, result = registry.given_for_one(route.name, value)
        self._keep_results([(index, result)] if result is not None else ())
        self._outputs += given
        self._where += [index] * len(given)

    def _refused(self, index: int, error: QueuedWriteFailed) -> None:
        """A write that this message queued is refused: it fails, with all else that it gave."""
        self._work.refused.add(error.what)
        if index in self._serving:  # nobody knows what it is going to do yet
            raise Culprit(index, error) from error
        self._fail_with_all(index, error)

    def _fail_with_all(self, index: int, error: Exception) -> None:
        """Let a message fail whose handler came to its end: what it gave is left out in the end."""
        self._fail(index, error)
        self._left_out.add(index)

    def _leave_out(self) -> None:
        """Those that failed give nothing."""
        work, failed = self._work, [self._records[index] for index in self._left_out]
        for assignment in assignments_of(failed):
            offsets = {record.message.offset for record in failed if record.assignment is assignment}
            if (parcel := work.outgoing.get(assignment)) is not None:
                left = [at for at, offset in enumerate(parcel.offsets) if offset not in offsets]
                work.outgoing[assignment] = parcel.only(left)
        work.results = [(record, result) for record, result in work.results if record not in failed]

    def _fail(self, index: int, error: Exception) -> None:
        """Let the message fail and the batch go on; Culprit if that cannot be.

        It can, if it fails for good and what it queued can be taken back; not if the same message comes again in
        this batch: the later delivery is to get its try.
        """
        failure = self._judge.verdict(self._records[index], error)
        in_place = failure is not None and self._fails_in_place and index not in self._claims.repeated
        if not in_place or not self._queue.withdraw(index):
            raise Culprit(index, error) from error
        self._records[index].failure = failure

    def _collect(self) -> None:
        """Encode what handlers of one message gave. Where that cannot be, the message has failed."""
        given, where = self._outputs, self._where
        self._outputs, self._where = [], []
        places = registry.places(where)
        try:
            self._add(where, self._encoded(given, where, places))
        except Exception:
            by_index = [(index, list(run)) for index, run in groupby(range(len(where)), key=where.__getitem__)]
            for index, run in by_index:
                of = [index] * len(run)
                try:
                    parcel = self._encoded([given[at] for at in run], of, [places[at] for at in run])
                except Exception as error:
                    self._fail_with_all(index, error)
                else:
                    self._add(of, parcel)

    def _encoded(self, given: Sequence[Output], where: Sequence[int], places: list[int]) -> EncodedOutputs:
        """What Kafka would refuse is refused now: later there is no way back."""
        parcel = outputs.encode_all(given, self._known_causes(), where, places)
        self._refuse_oversized(parcel)
        return parcel

    def _known_causes(self) -> Causes:
        if self._causes is None:
            self._causes = Causes(self._records)
        return self._causes

    def _add(self, where: Sequence[int], parcel: EncodedOutputs) -> None:
        """Give each partition its share; `where` tells the records that are answered, in order."""
        for assignment, start, end in self._stretches:
            first, last = bisect_left(where, start), bisect_left(where, end)
            share = parcel if last - first == len(parcel) else parcel.part(first, last)
            if assignment.silent_below:
                share = share.only([at for at, o in enumerate(share.offsets) if o >= assignment.silent_below])
            if len(share):
                self._work.add(assignment, share)

    def _keep_results(self, results: Iterable[tuple[int, Any]]) -> None:
        self._work.results += [(self._records[index], outputs.dump_json(result).decode()) for index, result in results]

    def _refuse_oversized(self, parcel: EncodedOutputs) -> None:
        if not len(parcel):
            return
        most = self._max_output
        longest = _longest(parcel.values) + _longest(parcel.keys)
        if longest <= most - STANDARD_HEADERS and not any(parcel.extras):
            return
        for output in parcel:
            size = output.size()
            if size > most:
                raise Reject(f"output to {output.topic} has {size} bytes, {most} at most")


def _longest(column: list[bytes | None]) -> int:
    return max(map(len, filter(None, column)), default=0)


def _route(record: Record) -> Route:
    assert record.route is not None
    return record.route


def max_output(settings: Settings) -> int:
    """The bytes that a record may have for the producer to take it."""
    most = settings.kafka.producer.get("message.max.bytes", DEFAULT_MESSAGE_MAX_BYTES)
    return int(most) - OUTPUT_OVERHEAD  # type: ignore[arg-type]
