"""One Kafka transaction per batch: outputs and offsets become visible together, or not at all.

The loop commits Postgres first and calls `publish` second. If we die in between, recovery finds
the outputs in the ledger and the offset unmoved, and publishes them; the first attempt was never
committed, so read_committed readers see each output once.

Sole user of confluent_kafka.Producer, and the one place where its errors get a meaning.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import structlog
from confluent_kafka import KafkaError, KafkaException, Producer, TopicPartition

from processor import failpoints
from processor.errors import BatchAborted, Fenced, Halt, ProcessorError
from processor.messages import outputs
from processor.messages.message import Partition
from processor.messages.outputs import CAUSATION_ID, CORRELATION_ID, MESSAGE_ID, EncodedOutputs
from processor.service.interpreter import MANY, breathe

if TYPE_CHECKING:
    from processor.settings.kafka import KafkaSettings

log = structlog.get_logger()

INIT_SECONDS = 30.0
# For the producer of somebody who is gone. The broker ends the transaction with its first request.
END_SECONDS = 5.0
# Of which it is asked so long at a time.
ASK_SECONDS = 0.1
# How long to wait for a connection before the brokers are asked for anything.
CONNECT_SECONDS = 2.0
# A call that may be repeated is repeated so often before the producer is given up for a new one.
ATTEMPTS = 4


class ProducerAction(Enum):
    """What an error of the producer asks for."""

    AGAIN = "call the same function again"
    ABORT = "abort this transaction; the producer is fine"
    REBUILD = "the producer is dead; a new one settles what it left behind"
    FENCED = "another instance took over; the producer is dead"
    OLD = "the group has moved on; the same once more as its member of today"
    HALT = "no repetition helps; an operator must act"


_FENCED = {
    KafkaError._FENCED,  # noqa: SLF001
    KafkaError.PRODUCER_FENCED,
    KafkaError.INVALID_PRODUCER_EPOCH,
    KafkaError.FENCED_INSTANCE_ID,
    KafkaError.FENCED_MEMBER_EPOCH,
    KafkaError.UNKNOWN_MEMBER_ID,
}

_OLD = {KafkaError.ILLEGAL_GENERATION, KafkaError.STALE_MEMBER_EPOCH, KafkaError.REBALANCE_IN_PROGRESS}

_HOPELESS = {
    KafkaError.MSG_SIZE_TOO_LARGE: "an output is larger than its topic takes; raise max.message.bytes of the topic",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "this user may not write to an output topic; grant WRITE on it",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "this user may not use the transactional id; grant WRITE on it",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "this user may not use the cluster so; check its ACLs",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "this user may not commit for the group; grant READ on it",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "kafka.transaction_timeout_ms is above the brokers' maximum",
    KafkaError._AUTHENTICATION: "the brokers refuse the credentials",  # noqa: SLF001
}


def action_after(error: KafkaError) -> ProducerAction:
    if error.code() in _HOPELESS:
        return ProducerAction.HALT
    if error.code() in _FENCED:
        # Fatal with the consumer protocol, abortable with the classic one: a new producer serves both.
        return ProducerAction.FENCED
    if error.code() in _OLD and error.txn_requires_abort():
        return ProducerAction.OLD
    if error.fatal():
        return ProducerAction.REBUILD
    if error.txn_requires_abort():
        return ProducerAction.ABORT
    if error.retriable():
        return ProducerAction.AGAIN
    return ProducerAction.REBUILD


class ProducerHung(ProcessorError):
    """librdkafka does not return: stop, exit 1, and let the next process settle it."""


class OldGeneration(Exception):
    """The transaction was aborted because the group has moved on; whether we are still in it is yet to be seen."""


@dataclass(frozen=True, slots=True)
class Offset:
    partition: Partition
    next_offset: int
    metadata: str


def end_left_open(settings: KafkaSettings, transactional_id: str) -> bool:
    """End the transaction, if there is one, of a producer that is gone; whether the broker has said so."""
    producer = _new_producer(settings, transactional_id)
    deadline = time.monotonic() + END_SECONDS
    while True:
        try:
            producer.init_transactions(ASK_SECONDS)
            break
        except KafkaException as error:
            if error.args[0].code() == KafkaError.CONCURRENT_TRANSACTIONS:
                break  # it is being ended; librdkafka would ask again in half a second
            if not error.args[0].retriable() or time.monotonic() > deadline:
                log.warning("left_open_not_ended", transactional_id=transactional_id, error=error.args[0].str())
                return False
    log.info("left_open_ended", transactional_id=transactional_id)
    return True


def _new_producer(settings: KafkaSettings, transactional_id: str) -> Producer:
    """Connected: one that has to ask for its coordinator before it is waits for half a second."""
    producer = Producer(settings.producer_config(transactional_id), logger=logging.getLogger("librdkafka"))
    with suppress(KafkaException):  # its next call says what is wrong
        producer.list_topics(timeout=CONNECT_SECONDS)
    return producer


class TransactionalProducer:
    """Owns the producer and its transaction. One transaction at a time, all calls on one thread."""

    def __init__(
        self,
        settings: KafkaSettings,
        lease: Callable[[], Awaitable[str]],
        group_metadata: Callable[[Any], Any],
    ) -> None:
        self._settings = settings
        self._lease = lease
        self._group_metadata = group_metadata
        # All attempts together take no longer than the transaction may stand open.
        self._patience = settings.transaction_timeout_ms / 1000 / ATTEMPTS
        self._longest = ATTEMPTS * (INIT_SECONDS + 2 * settings.transaction_timeout_ms / 1000)
        self._hung = False
        self._producer: Producer | None = None
        self._name = ""  # the transactional id that it has or had
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._one_at_a_time = asyncio.Lock()

    async def open(self) -> None:
        """Have a producer of the name that is leased to us, and end whatever transaction that was left with."""
        name = await self._lease()  # again: a lease goes with the connection, the producer does not
        async with self._one_at_a_time:
            if name != self._name:
                await self._run(self._close)
            if self._producer is None:
                await self._run(self._open, name)

    async def publish(
        self, parcels: Sequence[EncodedOutputs], offsets: Sequence[Offset], still_owned: Callable[[], bool]
    ) -> None:
        """Raises BatchAborted or Fenced if it was not, or may not have been, committed; recovery tells."""
        async with self._one_at_a_time:
            if self._producer is None:
                await self._run(self._open, await self._lease())
            await self._run(self._transact, parcels, offsets, still_owned)

    async def close(self) -> None:
        """Abort what is open, so that no reader waits for it."""
        if not self._hung:
            async with self._one_at_a_time:
                await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[..., None], *args: Any) -> None:
        """A call that outlasts all its own bounds hangs inside librdkafka; only a new process gets rid of it."""
        try:
            async with asyncio.timeout(self._longest):
                await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        except TimeoutError:
            self._hung = True
            raise ProducerHung(f"the producer does not come back from a call for {self._longest:.0f} s") from None

    # --- on the publish thread ---

    def _open(self, transactional_id: str) -> None:
        self._name = transactional_id
        self._producer = _new_producer(self._settings, transactional_id)
        self._call("initialising transactions", self._producer.init_transactions, INIT_SECONDS)
        log.info("producer_ready", transactional_id=transactional_id)

    def _transact(
        self, parcels: Sequence[EncodedOutputs], offsets: Sequence[Offset], still_owned: Callable[[], bool]
    ) -> None:
        refused = None
        while True:
            # Metadata first, ownership second. If the group has moved on in between, the metadata is old and
            # the broker refuses it; if the metadata is new, losing the partition has cleared its flag before.
            group = self._group_metadata(refused)
            if group is None or group == refused or not still_owned():
                raise Fenced("the group or a partition was left before the outputs were sent; the new owner sends them")
            try:
                self._send(parcels, offsets, group)
                return
            except OldGeneration:  # a rebalance: partitions that are still ours do not notice it
                refused = group

    def _send(self, parcels: Sequence[EncodedOutputs], offsets: Sequence[Offset], group: Any) -> None:
        producer = self._producer
        assert producer is not None
        self._call("beginning a transaction", producer.begin_transaction)
        failpoints.reach("after_begin")
        for parcel in parcels:
            self._produce(producer, parcel)
        failpoints.reach("after_produce")
        positions = [TopicPartition(o.partition.topic, o.partition.number, o.next_offset, o.metadata) for o in offsets]
        if positions:
            # Its own default is to wait without bound.
            self._call("sending offsets", producer.send_offsets_to_transaction, positions, group, self._patience)
        failpoints.reach("after_offsets")
        failpoints.reach("before_kafka_commit")
        # No time-out of our own: librdkafka bounds the call by what is left of transaction.timeout.ms.
        self._call("committing", producer.commit_transaction)
        failpoints.reach("after_kafka_commit")

    def _produce(self, producer: Producer, parcel: EncodedOutputs) -> None:
        produce = producer.produce
        columns = parcel.topics, parcel.keys, parcel.values, parcel.causes, parcel.ids, parcel.extras
        for number, (topic, key, value, cause, id_, extra) in enumerate(zip(*columns, strict=True), 1):
            if number % MANY == 0:
                breathe()
            headers: Any  # declared as text alone
            if extra is None and id_ is not None:
                headers = {MESSAGE_ID: id_, CAUSATION_ID: cause, CORRELATION_ID: cause}
            else:
                headers = outputs.headers(id_, cause, extra)
            while True:
                try:
                    # By position (no partition, no callbacks, no timestamp), which is a quarter faster than by name.
                    produce(topic, value, key, -1, None, None, 0, headers)
                    break
                except BufferError:
                    producer.poll(0.1)
                except KafkaException as error:
                    self._give_up(f"producing to {topic}", error.args[0])

    def _call(self, during: str, function: Callable[..., Any], *args: Any) -> None:
        attempts = 0
        while True:
            try:
                function(*args)
                return
            except KafkaException as error:
                attempts += 1
                if action_after(error.args[0]) is not ProducerAction.AGAIN or attempts == ATTEMPTS:
                    self._give_up(during, error.args[0])
                log.warning("kafka_call_repeated", during=during, error=error.args[0].str())

    def _give_up(self, during: str, error: KafkaError) -> NoReturn:
        verdict = action_after(error)
        text = f"{during}: {error.name()}: {error.str()}"
        if error.txn_requires_abort():
            self._abort()
        else:
            self._discard()
        match verdict:
            case ProducerAction.HALT:
                raise Halt(f"{text}; {_HOPELESS[error.code()]}")
            case ProducerAction.FENCED:
                raise Fenced(text)
            case ProducerAction.OLD if self._producer is not None:
                log.debug("generation_refused", reason=text)
                raise OldGeneration
            case _:
                raise BatchAborted(text)

    def _abort(self) -> None:
        assert self._producer is not None
        try:
            self._producer.abort_transaction()
        except KafkaException as error:
            log.warning("abort_failed", error=error.args[0].str())
            self._discard()

    def _discard(self) -> None:
        """Forget the producer. Initialising the next one with the same id settles what this one left open."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None

    def _close(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None
