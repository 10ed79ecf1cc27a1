"""The input side: a thread that polls, decodes and buffers, and the assignments of the partitions that we own.

This Consumer only reads the partitions that it is given, from the offsets that it is given. Another one, which is in
the group, learns which partitions are ours (membership.py). All calls run on the poll thread: the client serialises
calls, so a call from another thread would wait for the current poll to end.

An `Assignment` is one period of owning a partition, a `Reading` one uninterrupted reading of it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import groupby
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from processor.errors import Fenced
from processor.kafka import connections
from processor.kafka.assignment import NO_ENDS, Assignment
from processor.kafka.buffer import memory
from processor.kafka.final import raise_if_final
from processor.kafka.throttle import Throttle
from processor.kafka.turns import Turns
from processor.messages.batch import Batch, Span
from processor.messages.message import Partition
from processor.messages.record import Reading

if TYPE_CHECKING:
    from processor.messages.decode import Decoder
    from processor.settings.schema import Settings

log = structlog.get_logger()

# How long the thread sleeps when no records come in, and so how long a request to it may wait.
POLL_SECONDS = 0.05
# The most records that one call takes from librdkafka; a smaller batch lowers it.
BITE = 2000
BITE_SECONDS = 0.02
# How long to ask for a topic's brokers before the topic is read without knowing them.
MEET_SECONDS = 2.0
# How long to wait for room in a full buffer before the partitions are paused.
FULL_SECONDS = 1.0

_END = KafkaError._PARTITION_EOF  # noqa: SLF001
_OUT_OF_LOG = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)  # noqa: SLF001


class PartitionReader:
    def __init__(self, settings: Settings, decoder: Decoder) -> None:
        self._settings = settings
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        # librdkafka reports the end of a partition, which shows that only markers follow the last record.
        config = {**settings.kafka.consumer_config(settings.consumer), "enable.partition.eof": True}
        self._consumer = Consumer(config, logger=connections.logger)
        self._changed = threading.Condition()
        self.news = asyncio.Event()  # set for new records, assignments, or a failure
        self.lost = asyncio.Event()  # set when a partition is taken from us during work on it
        # Called on the event loop when partitions have to be given back.
        self.when_leaving: Callable[[], None] = lambda: None
        self.buffered = 0  # records
        self.buffered_bytes = 0
        self._turns = Turns(settings.batch.max_messages, settings.batch.max_bytes)
        self._assignments: dict[Partition, Assignment] = {}
        self._assigned: list[Assignment] = []
        self._to_stop: list[Partition] = []
        self._to_begin: dict[Assignment, tuple[Reading, int]] = {}
        self._to_meet: set[str] = set()  # topics that will be read
        self._reading: set[Partition] = set()  # used by the poll thread only
        self._throttle = Throttle(self._consumer, settings.batch.buffer_bytes)
        self.outside = False  # the group has dropped us, and has assigned nothing since
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="poll", daemon=True)

    # --- for the event loop ---

    def start(self) -> None:
        self._thread.start()

    async def close(self) -> None:
        """Stop reading."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def take_new(self) -> list[Assignment]:
        """Return the assignments since the last call: they have to be recovered."""
        with self._changed:
            new, self._assigned = [assignment for assignment in self._assigned if not assignment.leaving], []
        return new

    @property
    def has_a_batch(self) -> bool:
        batch = self._settings.batch
        return self.buffered >= batch.max_messages or self.buffered_bytes >= batch.max_bytes

    def take(self) -> Batch:
        """Return the next batch: all buffered records, or those of the partitions whose turn it is up to its limits.

        The records are in offset order within each partition. The partitions are in use until they are released.
        """
        max_bytes = self._settings.batch.max_bytes
        taken: list[Span] = []
        records, size = 0, 0
        with self._changed:
            most, shares = self._turns.next(self._assignments.values())
            for share in shares:
                spans = share.assignment.buffer.take(
                    min(share.most, most - records), min(share.max_bytes, max_bytes - size)
                )
                taken += spans
                records += sum(map(len, spans))
                size += sum(span.size for span in spans)
            self.buffered -= records
            self.buffered_bytes -= memory(taken)
            for reading in {span.reading for span in taken}:
                self._assignments[reading.partition].users += 1
            self._changed.notify_all()
        return Batch(taken)

    def fetching(self) -> list[Assignment]:
        with self._changed:
            return [assignment for assignment in self._assignments.values() if assignment.fetching]

    def begin(self, assignment: Assignment, reading: Reading, offset: int) -> None:
        """Start, or restart, reading a partition at this offset, unless it has to be given back."""
        with self._changed:
            if assignment.leaving:
                return
            self._drop_buffer(assignment)
            assignment.active, assignment.reading = True, reading
            assignment.read, assignment.empty, assignment.astray = offset, range(0), None
            assignment.current = False
            if assignment.end is None or offset < assignment.end:
                self._to_begin[assignment] = reading, offset
            self._changed.notify_all()

    def take_astray(self) -> dict[Assignment, str]:
        """Return partitions whose position is outside the log, and why, once all records read are processed."""
        with self._changed:
            found = {
                assignment: assignment.astray
                for assignment in self._assignments.values()
                if assignment.astray and not (assignment.leaving or assignment.buffer.records or assignment.users)
            }
            for assignment in found:
                assignment.astray = None
        return found

    def suspend(self, assignments: Iterable[Assignment]) -> None:
        """Stop reading these, and forget what was read ahead."""
        with self._changed:
            for assignment in assignments:
                self._stop(assignment)
            self._changed.notify_all()

    def owned(self) -> list[Assignment]:
        with self._changed:
            return list(self._assignments.values())

    def use(self, assignments: Iterable[Assignment]) -> None:
        with self._changed:
            for assignment in assignments:
                assignment.users += 1

    @contextmanager
    def using(self, assignments: Sequence[Assignment]) -> Iterator[None]:
        """Use partitions; raise Fenced if one of them has to be given back."""
        with self._changed:
            if any(assignment.leaving for assignment in assignments):
                raise Fenced("a partition is being given back")
            for assignment in assignments:
                assignment.users += 1
        try:
            yield
        finally:
            self.release(assignments)

    def release(self, assignments: Iterable[Assignment]) -> None:
        with self._changed:
            for assignment in assignments:
                assignment.users -= 1
            self._changed.notify_all()

    # --- for the group thread ---

    def assign(self, partitions: Iterable[Partition], ends: Mapping[Partition, int] = NO_ENDS) -> None:
        """Add partitions that are ours from now on. Recovery finds out where to start reading them."""
        with self._changed:
            for partition in partitions:
                assignment = self._assignments[partition] = Assignment(partition, ends.get(partition))
                self._assigned.append(assignment)
                self._to_meet.add(partition.topic)
            self.outside = False
        self._wake()

    def assignments(self, partitions: Iterable[Partition]) -> list[Assignment]:
        with self._changed:
            return [self._assignments[partition] for partition in partitions if partition in self._assignments]

    def leave(self, assignments: Iterable[Assignment]) -> None:
        """Begin nothing new with these."""
        with self._changed:
            for assignment in assignments:
                assignment.leaving = True
                self._stop(assignment)
            self._changed.notify_all()
        self._call_soon(self.when_leaving)
        self._wake()

    def wait_until_unused(self, assignments: Sequence[Assignment], seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: not any(assignment.users for assignment in assignments), seconds)

    def disown(self, assignments: Iterable[Assignment], *, lost: bool = False) -> None:
        # `owned` is cleared before the group can move on, and on the thread that reads the group metadata. So code that
        # takes the metadata first and checks `owned` second can never pair new metadata with old ownership.
        with self._changed:
            self.outside |= lost
            for assignment in assignments:
                assignment.owned = False
                self._assignments.pop(assignment.partition, None)
                if assignment.users:
                    self._call_soon(self.lost.set)
        self._wake()

    def fail(self, error: BaseException) -> None:
        """Pass an error to the event loop, which decides."""
        self._failure = error
        self._wake()

    # --- the poll thread ---

    def _run(self) -> None:
        try:
            bite = min(BITE, self._settings.batch.max_messages)
            while not self._closing:
                self._serve_requests()
                self._hold_back()
                if self._starving():
                    first = self._consumer.poll(POLL_SECONDS)
                    messages = [] if first is None else [first, *self._consumer.consume(bite, 0)]
                else:  # the next batch is complete: there is time, and few large reads cost less than many small ones
                    messages = self._consumer.consume(bite, BITE_SECONDS)
                if messages:
                    self._keep(messages)
        except BaseException as error:
            self.fail(error)
        finally:
            self._consumer.close()

    def _wake(self) -> None:
        self._call_soon(self.news.set)

    def _call_soon(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._closing:  # at the very end the loop may be closed
                raise

    def _stop(self, assignment: Assignment) -> None:
        self._drop_buffer(assignment)
        assignment.active = False
        # After this assignment was closed the partition may be ours again: a late call must not stop the new one.
        if self._assignments.get(assignment.partition) is assignment:
            self._to_stop.append(assignment.partition)

    def _drop_buffer(self, assignment: Assignment) -> None:
        assignment.fetching = False
        assignment.reading = None
        self._to_begin.pop(assignment, None)
        self.buffered -= assignment.buffer.records
        self.buffered_bytes -= assignment.buffer.bytes
        assignment.buffer.clear()

    def _serve_requests(self) -> None:
        with self._changed:
            to_begin, self._to_begin = self._to_begin, {}
            to_stop, self._to_stop = self._to_stop, []
            to_meet, self._to_meet = self._to_meet, set()
        for topic in to_meet - {partition.topic for partition in self._reading}:
            self._meet(topic)
        for partition in to_stop:
            self._stop_reading(partition)
        for assignment, (reading, offset) in to_begin.items():
            if assignment.reading is reading:
                # Unassigned and assigned again instead of a seek: this stops the fetcher and waits for it, so that no
                # late answer to an earlier request of librdkafka can move or stop the new fetcher.
                self._stop_reading(assignment.partition)
                where = TopicPartition(assignment.partition.topic, assignment.partition.number, offset)
                self._consumer.incremental_assign([where])
                self._reading.add(assignment.partition)
                if self._throttle.paused:
                    self._throttle.pause([assignment.partition])
                with self._changed:
                    assignment.fetching = assignment.reading is reading  # unless another reading has begun meanwhile

    def _meet(self, topic: str) -> None:
        """Find a topic's brokers while its partitions are still being recovered.

        When librdkafka has to read a topic whose brokers it does not know, it looks for them only once a second.
        """
        with suppress(KafkaException):
            self._consumer.list_topics(topic, MEET_SECONDS)

    def _stop_reading(self, partition: Partition) -> None:
        if partition in self._reading:
            self._throttle.forget(partition)
            self._consumer.incremental_unassign([TopicPartition(partition.topic, partition.number)])
            self._reading.discard(partition)

    def _hold_back(self) -> None:
        """Hold back while the buffer is full: for a moment by not polling, for longer by pausing partitions."""
        limit = self._settings.batch.buffer_bytes
        if not self._throttle.adjust(self.buffered_bytes, self.fetching()):
            return
        with self._changed:
            go_on = self._changed.wait_for(
                lambda: self.buffered_bytes < limit * 3 // 4 or self._to_begin or self._to_stop or self._closing,
                FULL_SECONDS,
            )
        if not go_on:
            self._throttle.pause(self._reading)

    def _starving(self) -> bool:
        """Return whether not even the next batch is complete, although partitions are being read."""
        return not (self.has_a_batch or self._throttle.paused) and bool(self.fetching())

    def _keep(self, messages: list[Any]) -> None:
        bad = [message for message in messages if message.error() is not None]
        ends: dict[Assignment, int] = {}
        for message in bad:
            assignment = self._assignments.get(Partition(message.topic(), message.partition()))
            if message.error().code() != _END:
                self._report(message.error(), assignment)
            elif assignment is not None:
                ends[assignment] = message.offset()
        good = [message for message in messages if message.error() is None] if bad else messages
        decoded = []
        for partition, raws in self._by_partition(good).items():
            assignment = self._assignments.get(partition)
            if assignment is not None and assignment.fetching and (reading := assignment.reading) is not None:
                if assignment.end is not None and raws[-1].offset() >= assignment.end:
                    ends[assignment] = assignment.end
                    raws = [raw for raw in raws if raw.offset() < assignment.end]
                decoded.append((assignment, reading, self._decoder.decode_all(raws, reading)))
        with self._changed:
            for assignment, reading, spans in decoded:
                if spans and assignment.reading is reading:
                    assignment.buffer.extend(spans)
                    assignment.read = spans[-1].end
                    self.buffered += sum(map(len, spans))
                    self.buffered_bytes += memory(spans)
            for assignment, end in ends.items():
                if assignment.fetching:
                    assignment.skip_to(end)
            for assignment in {*ends, *(assignment for assignment, _, _ in decoded)}:
                assignment.current = self._is_current(assignment)
                if assignment.fetching and assignment.over:
                    assignment.fetching = False
                    self._to_stop.append(assignment.partition)
        self._wake()

    def _is_current(self, assignment: Assignment) -> bool:
        """Return whether less than a batch of this partition waits, here and at the broker."""
        batch = self._settings.batch
        place = TopicPartition(assignment.partition.topic, assignment.partition.number)
        _, end = self._consumer.get_watermark_offsets(place, cached=True)  # as of the last fetch; asks nobody
        if assignment.buffer.records >= batch.max_messages or assignment.buffer.bytes >= batch.max_bytes:
            return False
        return end - assignment.read < batch.max_messages

    def _by_partition(self, messages: list[Any]) -> dict[Partition, list[Any]]:
        """Group messages by partition, keeping their order; they come in long runs of one partition."""
        found: dict[Partition, list[Any]] = {}
        topics = self._settings.topics
        number: Any  # declared as optional, but every message has one
        if len(topics) == 1:  # the usual case; reading a message's topic would take longer than all the rest
            for number, run in groupby(messages, Message.partition):
                found.setdefault(Partition(topics[0], number), []).extend(run)
        else:
            for place, run in groupby(messages, lambda message: (message.topic(), message.partition())):
                found.setdefault(Partition(*place), []).extend(run)
        return found

    def _report(self, error: KafkaError, assignment: Assignment | None) -> None:
        if error.code() not in _OUT_OF_LOG:
            raise_if_final(error)
        elif assignment is not None and assignment.fetching:  # otherwise that reading has ended
            # It may be a late answer about another offset: recovery finds out.
            assignment.astray = f"{assignment.partition}: {error.str()}"
