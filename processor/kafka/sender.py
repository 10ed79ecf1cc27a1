"""Sends records without a transaction, each to one given partition, and reports at which offset it arrived."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from processor.errors import SetupError
from processor.kafka import connections
from processor.settings import librdkafka

if TYPE_CHECKING:
    from processor.messages.message import Headers, Partition
    from processor.settings.kafka import KafkaSettings

METADATA_SECONDS = 10.0
DELIVERY_MS = 30_000

_HINTS = {
    KafkaError.MSG_SIZE_TOO_LARGE: "raise max.message.bytes of the topic",
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "grant this user WRITE on the topic",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "check this user's ACLs",
    KafkaError._MSG_TIMED_OUT: "are the brokers running?",  # noqa: SLF001
}


class Letter(NamedTuple):
    """A record to send; `name` is what the caller knows it by."""

    name: Hashable
    key: bytes | None
    value: bytes | None
    headers: Headers


class Sender:
    """Sends at most `rate` records a second, and nothing more once `stop` is set."""

    def __init__(self, settings: KafkaSettings, consumer: str, rate: float | None, stop: asyncio.Event) -> None:
        self._producer = Producer(producer_config(settings, consumer), logger=connections.logger)
        self._stop = stop
        self._pause = 1 / rate if rate else 0.0
        self._next = time.monotonic()

    async def require(self, partitions: Iterable[Partition]) -> None:
        """Fail unless all exist. Call it before sending: a producer that asks for a topic by name might create it."""
        try:
            topics = (await asyncio.to_thread(self._producer.list_topics, timeout=METADATA_SECONDS)).topics
        except KafkaException as error:
            raise SetupError(
                f"kafka.bootstrap_servers: the brokers do not answer: {error.args[0].str()}; nothing was sent"
            ) from None
        for partition in partitions:
            if partition.topic not in topics or partition.number not in topics[partition.topic].partitions:
                raise SetupError(f"{partition} does not exist any more: create it, or discard its messages")

    async def send(self, partition: Partition, letters: Sequence[Letter]) -> tuple[dict[Any, int], str | None]:
        """Send records; return the offsets of those that arrived, by name, and why the first other one failed."""
        delivered: dict[Any, int] = {}
        errors: list[KafkaError] = []
        for letter in letters:
            await self._pace()
            if self._stop.is_set() or errors:
                break
            if error := self._produce(partition, letter, _report(letter.name, delivered, errors)):
                errors.append(error)
        await asyncio.to_thread(self._producer.flush)
        return delivered, _explained(partition, errors[0]) if errors else None

    def _produce(
        self, partition: Partition, letter: Letter, report: Callable[[KafkaError | None, Any], None]
    ) -> KafkaError | None:
        headers: Any = list(letter.headers)  # confluent_kafka declares text only, and takes bytes too
        while True:
            try:
                # Without the original's timestamp, which could be so old that Kafka deletes the record at once.
                self._producer.produce(
                    partition.topic, letter.value, letter.key, partition.number, on_delivery=report, headers=headers
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
            try:
                async with asyncio.timeout(delay):
                    await self._stop.wait()
            except TimeoutError:
                pass


def producer_config(settings: KafkaSettings, consumer: str) -> dict[str, Any]:
    """Return the service's producer settings without transactions: idempotent, in order, all deliveries reported."""
    config = settings.producer_config(f"{consumer}-redrive")
    for name in ("transactional.id", "transaction.timeout.ms", "delivery.report.only.error"):
        config.pop(name, None)
    given = {librdkafka.canonical(name) for name in (*settings.client, *settings.producer)}
    ours = {
        "message.timeout.ms": DELIVERY_MS,
        "retry.backoff.ms": 100,
        # The topic has accepted this record before: its own limit decides, not the producer's.
        "message.max.bytes": 1_000_000_000,
    }
    return config | {name: value for name, value in ours.items() if name not in given}


def _report(
    name: Hashable, delivered: dict[Any, int], errors: list[KafkaError]
) -> Callable[[KafkaError | None, Any], None]:
    def report(error: KafkaError | None, message: Any) -> None:
        if error is None:
            delivered[name] = message.offset()
        else:
            errors.append(error)

    return report


def _explained(partition: Partition, error: KafkaError) -> str:
    hint = _HINTS.get(error.code())
    return f"sending to {partition} failed: {error.str()}" + (f"; {hint}" if hint else "")
