"""Kafka transactions: the outputs and offsets of batches become visible together, or not at all.

The loop commits to Postgres first and calls `publish` second. If we die in between, recovery finds
the outputs in the ledger and the offset unmoved, and publishes them. The first attempt was never
committed, so read_committed readers see each output once.

The only place that decides what an error of the transactional producer means.
"""

from __future__ import annotations

import asyncio
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
from processor.kafka import connections
from processor.messages.message import Partition
from processor.messages.outputs import CAUSATION_ID, CORRELATION_ID, MESSAGE_ID, EncodedOutputs
from processor.messages.outputs import headers as output_headers
from processor.threads import MANY, breathe

if TYPE_CHECKING:
    from processor.settings.kafka import KafkaSettings

log = structlog.get_logger()

INIT_SECONDS = 30.0
# How long to try to end a dead producer's transaction. The broker ends it at our producer's first request.
END_SECONDS = 5.0
# How long each of these tries may take.
ASK_SECONDS = 0.1
# How long to wait for a connection before the first request.
CONNECT_SECONDS = 2.0
# How often a retriable call is made before a new producer replaces this one.
ATTEMPTS = 4


class ProducerAction(Enum):
    """What an error of the producer asks for."""

    AGAIN = "call the same function again"
    ABORT = "abort this transaction; the producer is fine"
    REBUILD = "the producer is dead; a new one ends the transaction that it left open"
    FENCED = "another instance took over; the producer is dead"
    OLD = "the group has moved on; the same again with its new metadata"
    HALT = "repeating does not help; an operator must act"


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
    KafkaError.MSG_SIZE_TOO_LARGE: "an output is larger than its topic allows; raise max.message.bytes of the topic",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "this user may not write to an output topic; grant WRITE on it",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "this user may not use the transactional id; grant WRITE on it",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "this user lacks a right on the cluster; check its ACLs",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "this user may not commit for the group; grant READ on it",
    KafkaError.INVALID_TRANSACTION_TIMEOUT: "kafka.transaction_timeout_ms is above the brokers' maximum",
    KafkaError._AUTHENTICATION: "the brokers refuse the credentials",  # noqa: SLF001
}


def action_after(error: KafkaError) -> ProducerAction:
    if error.code() in _HOPELESS:
        return ProducerAction.HALT
    if error.code() in _FENCED:
        # Fatal with the consumer protocol, abortable with the classic one: a new producer is right for both.
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
    """librdkafka does not return: stop, exit 1; the next process ends the transaction."""


class OldGeneration(Exception):
    """The transaction was aborted because the group has moved on; newer metadata shows whether we are still in it."""


@dataclass(frozen=True, slots=True)
class Offset:
    partition: Partition
    next_offset: int
    metadata: str


def end_left_open(settings: KafkaSettings, transactional_id: str) -> bool:
    """End the transaction, if any, that a dead producer left open; return whether the broker has confirmed it."""
    producer = _new_producer(settings, transactional_id)
    deadline = time.monotonic() + END_SECONDS
    while True:
        try:
            producer.init_transactions(ASK_SECONDS)
            break
        except KafkaException as error:
            if error.args[0].code() == KafkaError.CONCURRENT_TRANSACTIONS:
                break  # the broker is ending it; librdkafka would ask again only after half a second
            if not error.args[0].retriable() or time.monotonic() > deadline:
                log.warning("left_open_not_ended", transactional_id=transactional_id, error=error.args[0].str())
                return False
    log.info("left_open_ended", transactional_id=transactional_id)
    return True


def _new_producer(settings: KafkaSettings, transactional_id: str) -> Producer:
    """Return a connected producer: one that looks for its coordinator before it is connected waits half a second."""
    producer = Producer(settings.producer_config(transactional_id), logger=connections.logger)
    with suppress(KafkaException):  # the next call raises what is wrong
        producer.list_topics(timeout=CONNECT_SECONDS)
    return producer


class TransactionalProducer:
    """Owns the producer and its transaction: one transaction at a time, all calls on one thread."""

    def __init__(
        self,
        settings: KafkaSettings,
        lease: Callable[[], Awaitable[str]],
        group_metadata: Callable[[Any], Any],
    ) -> None:
        self._settings = settings
        self._lease = lease
        self._group_metadata = group_metadata
        # All attempts together take no longer than the transaction may stay open.
        self._patience = settings.transaction_timeout_ms / 1000 / ATTEMPTS
        self._longest = ATTEMPTS * (INIT_SECONDS + 2 * settings.transaction_timeout_ms / 1000)
        self._hung = False
        self._producer: Producer | None = None
        self._name = ""  # the transactional id of the current or the last producer
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="publish")
        self._one_at_a_time = asyncio.Lock()

    async def open(self) -> None:
        """Make sure that a producer has the name leased to us; initialising it ends a transaction left open there."""
        name = await self._lease()  # leased again: a lost connection loses the lease, but not the producer
        async with self._one_at_a_time:
            if name != self._name:
                await self._run(self._close)
            if self._producer is None:
                await self._run(self._open, name)

    async def publish(
        self, outputs: Sequence[EncodedOutputs], offsets: Sequence[Offset], still_owned: Callable[[], bool]
    ) -> None:
        """Raise BatchAborted or Fenced if it was not, or may not have been, committed; recovery finds out."""
        async with self._one_at_a_time:
            if self._producer is None:
                await self._run(self._open, await self._lease())
            await self._run(self._transact, outputs, offsets, still_owned)

    async def close(self) -> None:
        """Abort the open transaction, so that no reader waits for it."""
        if not self._hung:
            async with self._one_at_a_time:
                await self._run(self._close)
        self._thread.shutdown(wait=False)

    async def _run(self, function: Callable[..., None], *args: Any) -> None:
        """Run a call on the publish thread. One that outlasts all its bounds hangs: only a new process helps."""
        try:
            async with asyncio.timeout(self._longest):
                await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)
        except TimeoutError:
            self._hung = True
            raise ProducerHung(f"the producer has not returned from a call for {self._longest:.0f} s") from None

    # --- on the publish thread ---

    def _open(self, transactional_id: str) -> None:
        self._name = transactional_id
        self._producer = _new_producer(self._settings, transactional_id)
        self._call("initialising transactions", self._producer.init_transactions, INIT_SECONDS)
        log.info("producer_ready", transactional_id=transactional_id)

    def _transact(
        self, outputs: Sequence[EncodedOutputs], offsets: Sequence[Offset], still_owned: Callable[[], bool]
    ) -> None:
        refused = None
        while True:
            # Metadata first, ownership second. If the group moves on in between, the metadata is old and the
            # broker refuses it. If the metadata is new, a lost partition has been marked as not owned before.
            group = self._group_metadata(refused)
            if group is None or group == refused or not still_owned():
                raise Fenced("the group or a partition was left before the outputs were sent; the new owner sends them")
            try:
                self._send(outputs, offsets, group)
                return
            except OldGeneration:  # after a rebalance, partitions that are still ours go on as before
                refused = group

    def _send(self, outputs: Sequence[EncodedOutputs], offsets: Sequence[Offset], group: Any) -> None:
        producer = self._producer
        assert producer is not None
        self._call("beginning a transaction", producer.begin_transaction)
        failpoints.reach("after_begin")
        for encoded in outputs:
            self._produce(producer, encoded)
        failpoints.reach("after_produce")
        positions = [TopicPartition(o.partition.topic, o.partition.number, o.next_offset, o.metadata) for o in offsets]
        if positions:
            # Without a time-out it would wait for ever.
            self._call("sending offsets", producer.send_offsets_to_transaction, positions, group, self._patience)
        failpoints.reach("after_offsets")
        failpoints.reach("before_kafka_commit")
        # Without a time-out of ours: librdkafka bounds the call by what is left of transaction.timeout.ms.
        self._call("committing", producer.commit_transaction)
        failpoints.reach("after_kafka_commit")

    def _produce(self, producer: Producer, encoded: EncodedOutputs) -> None:
        produce = producer.produce
        columns = encoded.topics, encoded.keys, encoded.values, encoded.causes, encoded.ids, encoded.extras
        for number, (topic, key, value, cause, id_, extra) in enumerate(zip(*columns, strict=True), 1):
            if number % MANY == 0:
                breathe()
            headers: Any  # confluent_kafka declares text only, and takes bytes too
            if extra is None and id_ is not None:
                headers = {MESSAGE_ID: id_, CAUSATION_ID: cause, CORRELATION_ID: cause}
            else:
                headers = output_headers(id_, cause, extra)
            while True:
                try:
                    # Arguments by position (no partition, callbacks or timestamp): a quarter faster than by name.
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
        action = action_after(error)
        text = f"{during}: {error.name()}: {error.str()}"
        if error.txn_requires_abort():
            self._abort()
        else:
            self._discard()
        match action:
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
        """Forget the producer. Initialising the next one with the same id ends the transaction that this one left."""
        if self._producer is not None:
            self._producer.purge()
            self._producer = None

    def _close(self) -> None:
        if self._producer is not None:
            self._producer.close()
            self._producer = None
