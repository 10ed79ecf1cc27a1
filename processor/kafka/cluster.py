"""What the brokers say: which topics exist, where their logs begin and end, what a group has committed.

Blocking calls; the engine makes them off the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # exported, not declared so

from processor.errors import BatchAborted
from processor.messages.message import Partition
from processor.messages.positions import CommittedOffset, Log

if TYPE_CHECKING:
    from confluent_kafka.admin import TopicDescription  # type: ignore[attr-defined]

    from processor.settings.kafka import KafkaSettings

TIMEOUT_SECONDS = 10.0

# Partitions about which the brokers could not say what they were asked, and why.
Untold: TypeAlias = dict[Partition, str]


@dataclass(frozen=True, slots=True)
class Topic:
    id: str
    partitions: frozenset[int]


def _id(topic: Any) -> str:
    """As Kafka's own tools write it; librdkafka has another alphabet."""
    return str(topic.topic_id).replace("+", "-").replace("/", "_")


class Cluster:
    def __init__(self, settings: KafkaSettings, group: str) -> None:
        logger = logging.getLogger("librdkafka")
        self._admin = AdminClient(settings.admin_config(), logger=logger)
        # Never joins the group, it only asks about it. The AdminClient can be asked too, but librdkafka 2.16
        # crashes in there when the group's coordinator is just moving or loading.
        self._reader = Consumer(settings.consumer_config(group), logger=logger)
        self._known: frozenset[str] = frozenset()

    def missing(self, topics: Iterable[str]) -> set[str]:
        """Those of the topics that do not exist. Asks the brokers only about names not seen since it last forgot."""
        wanted, known = set(topics), self._known
        if not wanted <= known:
            try:
                self._known = known = frozenset(self._admin.list_topics(timeout=TIMEOUT_SECONDS).topics)
            except KafkaException as error:
                raise BatchAborted(f"the brokers do not answer: {error.args[0].str()}") from None
        return wanted - known

    def forget(self) -> None:
        """Ask the brokers again: topics may have been deleted since."""
        self._known = frozenset()

    def knows(self, topics: Iterable[str]) -> bool:
        """Whether `missing` would answer at once that all exist."""
        return self._known.issuperset(topics)

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Those of the topics that exist."""
        asked = self._admin.describe_topics(TopicCollection(sorted(set(names))), request_timeout=TIMEOUT_SECONDS)
        found: dict[str, Topic] = {}
        for name, future in asked.items():
            try:
                topic = future.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise BatchAborted(f"the brokers do not describe {name}: {error.args[0].str()}") from None
            else:
                found[name] = Topic(_id(topic), frozenset(partition.id for partition in topic.partitions))
        return found

    def logs(self, partitions: Sequence[Partition]) -> tuple[dict[Partition, Log], Untold]:
        untold: Untold = {}
        topics: dict[str, TopicDescription] = {}
        names = sorted({partition.topic for partition in partitions})
        for name, future in self._admin.describe_topics(
            TopicCollection(names), request_timeout=TIMEOUT_SECONDS
        ).items():
            try:
                topics[name] = future.result()
            except KafkaException as error:
                untold |= {at: _untold(at, error) for at in partitions if at.topic == name}
        known = [at for at in partitions if at.topic in topics]
        starts = self._offsets(known, OffsetSpec.earliest(), untold)  # type: ignore[no-untyped-call]
        ends = self._offsets(starts, OffsetSpec.latest(), untold)  # type: ignore[no-untyped-call]
        logs = {}
        for at, end in ends.items():
            topic = topics[at.topic]
            logs[at] = Log(_id(topic), starts[at], end, len(topic.partitions))
        return logs, untold

    def committed(self, partitions: Sequence[Partition]) -> tuple[dict[Partition, CommittedOffset | None], Untold]:
        """The group's offsets, once no open transaction can change them any more; BatchAborted while one could."""
        try:
            answers = self._reader.committed(
                [TopicPartition(partition.topic, partition.number) for partition in partitions], TIMEOUT_SECONDS
            )
        except KafkaException as error:
            raise BatchAborted(f"the committed offsets could not be read: {error.args[0].str()}") from None
        found: dict[Partition, CommittedOffset | None] = {}
        untold: Untold = {}
        for answer in answers:
            partition = Partition(answer.topic, answer.partition)
            if answer.error is not None:
                untold[partition] = f"{partition}: the committed offset could not be read: {answer.error.str()}"
                continue
            found[partition] = (
                None if answer.offset == OFFSET_INVALID else CommittedOffset(answer.offset, answer.metadata or "")
            )
        return found, untold

    def close(self) -> None:
        self._reader.close()

    def _offsets(self, partitions: Iterable[Partition], spec: OffsetSpec, untold: Untold) -> dict[Partition, int]:
        asked = {TopicPartition(partition.topic, partition.number): spec for partition in partitions}
        found = {}
        for at, future in self._admin.list_offsets(asked, request_timeout=TIMEOUT_SECONDS).items() if asked else ():
            partition = Partition(at.topic, at.partition)
            try:
                found[partition] = future.result().offset
            except KafkaException as error:
                untold[partition] = _untold(partition, error)
        return found


def _untold(partition: Partition, error: KafkaException) -> str:
    return f"{partition}: the brokers do not say where its log stands: {error.args[0].str()}"
