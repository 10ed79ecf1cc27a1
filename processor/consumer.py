"""The input side: a thread that polls, decodes and buffers, and the partitions we own while we own them.

Sole user of confluent_kafka.Consumer. All its calls and its rebalance callbacks run on the poll thread (the
client serialises calls, so that a call from another thread would wait for a poll to let it in). That
thread never waits for a handler longer than a moment: when the buffer stays full it pauses partitions and goes on
polling, so that a slow handler never costs the membership in the group.

An `Assignment` is one span of owning one partition. It is made on assign, closed on revoke or
loss, and never used again; whatever still refers to a closed one is void.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from processor.buffer import Buffer, memory
from processor.errors import Halt, ProcessorError
from processor.records import Partition
from processor.spans import Records, Span

if TYPE_CHECKING:
    from processor.budget import Budget
    from processor.config import Settings
    from processor.decode import Decoder

log = structlog.get_logger()

# How long the thread sleeps when nothing comes in, and so how long a request to it may wait.
POLL_SECONDS = 0.05
# So many records are read at once, but no more than a batch.
BITE = 2000
# Whether the group still counts us in is asked so often, and whenever partitions come. Each time librdkafka
# holds up all threads of the process for about as long as it takes to read a thousand records.
MEMBERSHIP_SECONDS = 0.1
BITE_SECONDS = 0.02
# How long to wait for a full buffer to be emptied before the partitions are paused.
FULL_SECONDS = 1.0

_OUT_OF_LOG = (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE)  # noqa: SLF001
_FORBIDDEN = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)


@dataclass(slots=True, eq=False)
class Assignment:
    partition: Partition
    owned: bool = True
    fetching: bool = False
    active: bool = False  # is being read, or about to be
    epoch: int = 0
    source: int = 0  # the partition's name in the inbox
    position: int = 0  # the offset after the last record that Postgres has committed
    published: int = 0  # everything below is known to be in Kafka
    silent_below: int = 0
    users: int = 0  # batches, publications and recoveries at work on it
    known: bool = False  # it has been recovered before
    begun: bool = False  # it is on record that we work on it
    committed: bool = False  # we have committed a batch of it
    caution: int = 0  # of so many records it is told when they are tried: one of them may have killed our predecessors
    suspect: range | None = None  # the offsets that the last of those was at
    deaths: int = 0  # so many of them in a row, at just these
    outages: int = 0  # in a row
    halted: str | None = None  # why it goes no further, if an operator has to look at it
    parked_keys: set[bytes] = field(default_factory=set)  # of which later messages have to wait
    attempts: dict[int, int] = field(default_factory=dict)  # by offset: that failed, of types without inbox
    budget: Budget | None = None
    buffer: Buffer = field(default_factory=Buffer)
    reading: int = 0  # which one it is: the first, or one that began anew after what was read ahead was forgotten


class Source:
    def __init__(self, settings: Settings, decoder: Decoder) -> None:
        self._settings = settings
        self._decoder = decoder
        self._loop = asyncio.get_running_loop()
        self._consumer = Consumer(
            settings.kafka.consumer_config(settings.consumer), logger=logging.getLogger("librdkafka")
        )
        self._changed = threading.Condition()
        self.news = asyncio.Event()  # something to look at: records, assignments, a failure
        self.lost = asyncio.Event()  # a partition went away while work on it was under way
        self.buffered = 0  # records
        self.buffered_bytes = 0
        self._first = 0
        self._assignments: dict[Partition, Assignment] = {}
        self._new: list[Assignment] = []
        self._to_pause: list[Assignment] = []
        self._to_begin: list[tuple[Assignment, int]] = []
        self._throttled = False
        self._group_metadata: Any = None
        self._look_again = 0.0
        self.outside = False  # the group has dropped us, and we are not back yet
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="poll", daemon=True)

    # --- for the event loop ---

    def start(self) -> None:
        self._thread.start()

    async def close(self) -> None:
        """Leave the group; bounded by librdkafka's own close and the revoke timeout."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def take_new(self) -> list[Assignment]:
        """Assignments that nobody has recovered yet; each is in use until released."""
        with self._changed:
            new, self._new = [assignment for assignment in self._new if assignment.owned], []
        self.use(new)
        return new

    @property
    def has_a_batch(self) -> bool:
        batch = self._settings.batch
        return self.buffered >= batch.max_messages or self.buffered_bytes >= batch.max_bytes

    def take(self) -> Records:
        """The next batch: all that is there, or as much as it holds of the partitions whose turn it is.

        In offset order within each. Its assignments are in use until released.
        """
        batch = self._settings.batch
        taken: list[Span] = []
        records, size = 0, 0
        with self._changed:
            ready = [assignment for assignment in self._assignments.values() if assignment.buffer.records]
            # Another one is served first each time, so that none starves. To take of each a little would be as fair in
            # the end, but every batch would be in as many pieces, in the ledger as in memory.
            self._first = (self._first + 1) % max(1, len(ready))
            for assignment in ready[self._first :] + ready[: self._first]:
                spans = assignment.buffer.take(batch.max_messages - records, batch.max_bytes - size)
                taken += spans
                records += sum(map(len, spans))
                size += sum(span.size for span in spans)
            self.buffered -= records
            self.buffered_bytes -= memory(taken)
            readings = {span.assignment: span.assignment.reading for span in taken}
            for assignment in readings:
                assignment.users += 1
            self._changed.notify_all()
        return Records(taken, readings)

    def fetching(self) -> list[Assignment]:
        with self._changed:
            return [assignment for assignment in self._assignments.values() if assignment.fetching]

    def begin(self, assignment: Assignment, offset: int) -> None:
        """Start, or start again, to read a partition at this offset."""
        assignment.position = offset
        with self._changed:
            self._drop_buffer(assignment)
            assignment.active = True
            self._to_begin.append((assignment, offset))
            self._changed.notify_all()

    def suspend(self, assignments: Iterable[Assignment]) -> None:
        """Take nothing more from these, and forget what was read ahead."""
        with self._changed:
            for assignment in assignments:
                self._drop_buffer(assignment)
                assignment.active = False
                self._to_pause.append(assignment)
            self._changed.notify_all()

    def owned(self) -> list[Assignment]:
        with self._changed:
            return list(self._assignments.values())

    def active(self) -> list[Assignment]:
        return [assignment for assignment in self.owned() if assignment.active]

    def outdated(self, records: Records) -> list[Assignment]:
        """Of records that were taken earlier: the partitions that were left, or are to be read again, since then."""
        with self._changed:
            return [a for a, reading in records.readings.items() if not a.owned or a.reading != reading]

    def use(self, assignments: Iterable[Assignment]) -> None:
        with self._changed:
            for assignment in assignments:
                assignment.users += 1

    def release(self, assignments: Iterable[Assignment]) -> None:
        with self._changed:
            for assignment in assignments:
                assignment.users -= 1
            self._changed.notify_all()

    # --- for the publish thread ---

    def group_metadata(self) -> Any:
        """As of a moment ago, None outside the group. If that has moved on, the broker refuses it, as it should."""
        return self._group_metadata

    # --- the poll thread ---

    def _run(self) -> None:
        try:
            self._consumer.subscribe(
                list(self._settings.topics),
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            bite = min(BITE, self._settings.batch.max_messages)
            while not self._closing:
                self._serve_requests()
                self._throttle()
                if self._starving():
                    first = self._consumer.poll(POLL_SECONDS)
                    messages = [] if first is None else [first, *self._consumer.consume(bite, 0)]
                else:  # the next batch is there already: no hurry, a few large bites cost less than many small ones
                    messages = self._consumer.consume(bite, BITE_SECONDS)
                if time.monotonic() >= self._look_again:
                    self._group_metadata = self._membership()
                if messages:
                    self._keep(messages)
        except BaseException as error:  # handed to the event loop, which decides
            self._failure = error
        finally:
            try:
                self._consumer.close()
            except (KafkaException, RuntimeError) as error:
                log.warning("consumer_close_failed", error=str(error))
            self._wake()

    def _membership(self) -> Any:
        """What proves to the broker that we belong to the group; None while we do not.

        Metadata without a member id would not be refused: the broker takes it for a lone client's.
        """
        self._look_again = time.monotonic() + MEMBERSHIP_SECONDS
        return self._consumer.consumer_group_metadata() if self._consumer.memberid() else None

    def _wake(self) -> None:
        self._call_soon(self.news.set)

    def _call_soon(self, function: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:
            if not self._closing:  # a closed loop at the very end is no news
                raise

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        # Recovery finds out where to start; until then the partitions are paused at an offset that means nothing.
        for partition in partitions:
            partition.offset = 0
        self.outside = False
        consumer.incremental_assign(partitions)
        consumer.pause(partitions)
        with self._changed:
            for owned in map(_partition, partitions):
                assignment = self._assignments[owned] = Assignment(owned)
                self._new.append(assignment)
        self._group_metadata = self._membership()
        log.info("partitions_assigned", partitions=_names(partitions))
        self._wake()

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Let work under way finish, for a bounded time; the successor repairs whatever does not."""
        with self._changed:
            leaving = self._leave(partitions)
            finished = self._changed.wait_for(
                lambda: all(not assignment.users for assignment in leaving),
                self._settings.kafka.revoke_timeout_ms / 1000,
            )
            self._disown(leaving)
        consumer.incremental_unassign(partitions)
        log.info("partitions_revoked", partitions=_names(partitions), finished=finished)
        self._wake()

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Somebody else has them already: drop everything at once."""
        self.outside = True
        with self._changed:
            self._disown(self._leave(partitions))
        consumer.incremental_unassign(partitions)
        log.warning("partitions_lost", partitions=_names(partitions))
        self._wake()

    def _leave(self, partitions: list[TopicPartition]) -> list[Assignment]:
        leaving = [self._assignments[p] for p in map(_partition, partitions) if p in self._assignments]
        for assignment in leaving:
            self._drop_buffer(assignment)
        return leaving

    def _disown(self, leaving: list[Assignment]) -> None:
        # `owned` is cleared before the group can move on, and on the thread that reads the group metadata: whoever
        # takes the metadata first and looks at `owned` second can never pair new metadata with old ownership.
        for assignment in leaving:
            assignment.owned = False
            self._assignments.pop(assignment.partition, None)
            if assignment.users:
                self._call_soon(self.lost.set)

    def _drop_buffer(self, assignment: Assignment) -> None:
        assignment.fetching = False
        assignment.reading += 1
        self.buffered -= assignment.buffer.records
        self.buffered_bytes -= assignment.buffer.bytes
        assignment.buffer.clear()

    def _serve_requests(self) -> None:
        with self._changed:
            requests, self._to_begin = self._to_begin, []
            to_pause, self._to_pause = [a for a in self._to_pause if a.owned], []
        if to_pause:
            self._consumer.pause([_topic_partition(assignment) for assignment in to_pause])
        for assignment, offset in requests:
            if not assignment.owned:
                continue
            where = TopicPartition(assignment.partition.topic, assignment.partition.number, offset)
            # Given back and taken again at the offset, instead of a seek: that stops the fetcher and waits for it, so
            # no answer to an earlier question of librdkafka's can move or stop the new one. Resumed first, because
            # a resume restarts a fetcher where it was when it was paused.
            self._consumer.resume([where])
            self._consumer.incremental_unassign([where])
            self._consumer.incremental_assign([where])
            if self._throttled:
                self._consumer.pause([where])
            with self._changed:
                assignment.fetching = assignment.owned

    def _throttle(self) -> None:
        """Hold back while the buffer is full: a moment by not polling, longer by pausing the partitions.

        A pause throws away what librdkafka has fetched ahead, so it is kept for handlers that do not keep up.
        """
        limit = self._settings.batch.buffer_bytes
        if self._throttled:
            if self.buffered_bytes <= limit // 2:
                self._throttled = False
                self._consumer.resume([_topic_partition(assignment) for assignment in self.fetching()])
            return
        if self.buffered_bytes < limit:
            return
        with self._changed:
            go_on = self._changed.wait_for(
                lambda: self.buffered_bytes < limit * 3 // 4 or self._to_begin or self._to_pause or self._closing,
                FULL_SECONDS,
            )
        if not go_on:
            self._throttled = True
            self._consumer.pause([_topic_partition(assignment) for assignment in self.fetching()])

    def _starving(self) -> bool:
        """Whether there is not even the next batch, although something is being read."""
        return not (self.has_a_batch or self._throttled) and bool(self.fetching())

    def _keep(self, messages: list[Any]) -> None:
        bad = [message for message in messages if message.error() is not None]
        for message in bad:
            self._report(message.error(), self._assignments.get(Partition(message.topic(), message.partition())))
        good = [message for message in messages if message.error() is None] if bad else messages
        decoded = []
        for partition, raws in self._by_partition(good).items():
            assignment = self._assignments.get(partition)
            if assignment is not None and assignment.fetching:
                decoded.append((assignment, self._decoder.decode_all(raws, assignment).spans))
        with self._changed:
            for assignment, spans in decoded:
                if assignment.fetching:
                    assignment.buffer.extend(spans)
                    self.buffered += sum(map(len, spans))
                    self.buffered_bytes += memory(spans)
        self._wake()

    def _by_partition(self, messages: list[Any]) -> dict[Partition, list[Any]]:
        """In their order within each. They come in long runs of one."""
        found: dict[Partition, list[Any]] = {}
        topics = self._settings.topics
        number: Any  # declared as if there were messages without one
        if len(topics) == 1:  # as a rule; a message takes longer to name its topic than all the rest
            for number, run in groupby(messages, Message.partition):
                found.setdefault(Partition(topics[0], number), []).extend(run)
        else:
            for place, run in groupby(messages, lambda message: (message.topic(), message.partition())):
                found.setdefault(Partition(*place), []).extend(run)
        return found

    def _report(self, error: KafkaError, assignment: Assignment | None) -> None:
        if error.code() in _OUT_OF_LOG:
            if assignment is not None and not assignment.fetching:
                return  # of the offset it was assigned with, which nobody is going to read
            raise Halt(f"the log no longer holds the offset to be read: {error.str()}; see kafka-consumer-groups")
        if error.code() in _FORBIDDEN:
            raise Halt(f"the broker forbids it: {error.str()}; check the ACLs of this user")
        if error.fatal():
            raise ConsumerDied(f"the consumer cannot go on: {error.str()}")
        log.warning("consumer_error", code=error.name(), error=error.str())


class ConsumerDied(ProcessorError):
    """librdkafka's consumer reported a fatal error; a new process starts clean."""


def _partition(partition: TopicPartition) -> Partition:
    return Partition(partition.topic, partition.partition)


def _topic_partition(assignment: Assignment) -> TopicPartition:
    return TopicPartition(assignment.partition.topic, assignment.partition.number)


def _names(partitions: list[TopicPartition]) -> list[str]:
    return [str(_partition(partition)) for partition in partitions]
