"""Questions to the brokers: which topics exist, where their logs begin and end, what a group has committed.

All calls block; the engine makes them off the event loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined] # exported, not declared so
    AdminClient,
    ConfigResource,
    OffsetSpec,
)

from processor.errors import BatchAborted, SetupError
from processor.kafka import connections
from processor.kafka.outsider import outsider
from processor.messages.message import Partition
from processor.messages.positions import CommittedOffset, Log

if TYPE_CHECKING:
    from confluent_kafka.admin import TopicDescription  # type: ignore[attr-defined]

    from processor.kafka.connections import Broker
    from processor.settings.kafka import KafkaSettings

TIMEOUT_SECONDS = 10.0
# How long a broker may take to answer at all.
ALIVE_SECONDS = 2.0

# Partitions about which the brokers gave no answer, and why.
Unknown: TypeAlias = dict[Partition, str]


@dataclass(frozen=True, slots=True)
class Topic:
    id: str
    partitions: frozenset[int]


def _id(topic: Any) -> str:
    """Return the topic id as Kafka's own tools write it; librdkafka uses another base64 alphabet."""
    return str(topic.topic_id).replace("+", "-").replace("/", "_")


class Cluster:
    def __init__(self, settings: KafkaSettings, group: str) -> None:
        self._settings = settings
        self._group = group
        self._admin = AdminClient(settings.admin_config(), logger=connections.silent)
        # It never joins the group, it only asks about it. The AdminClient could ask too, but librdkafka 2.16
        # crashes in that call while the group's coordinator is moving or loading.
        self._reader = Consumer(settings.consumer_config(group), logger=connections.silent)
        self._known: frozenset[str] = frozenset()

    def missing(self, topics: Iterable[str]) -> set[str]:
        """Return the topics that do not exist. Asks the brokers only about names not seen since it last forgot."""
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
        """Return whether `missing` would find without asking that all exist."""
        return self._known.issuperset(topics)

    def topics(self, names: Iterable[str]) -> dict[str, Topic]:
        """Return the topics that exist."""
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

    def answering(self, brokers: Iterable[Broker]) -> set[Broker]:
        """Return those of the brokers that answer now, if only with a refusal."""
        found, asked = set(), {}
        for broker in brokers:
            if broker.id is None:  # an address of a bootstrap server: any answer will do
                with suppress(KafkaException):
                    self._admin.list_topics(timeout=ALIVE_SECONDS)
                    found.add(broker)
            else:
                resource = ConfigResource(ConfigResource.Type.BROKER, str(broker.id))  # which only that one answers
                (asked[broker],) = self._admin.describe_configs([resource], request_timeout=ALIVE_SECONDS).values()
        for broker, answer in asked.items():
            error = answer.exception()
            if error is None or error.args[0].code() > 0:  # below are those of librdkafka
                found.add(broker)
        return found

    def logs(self, partitions: Sequence[Partition]) -> tuple[dict[Partition, Log], Unknown]:
        unknown: Unknown = {}
        topics: dict[str, TopicDescription] = {}
        names = sorted({partition.topic for partition in partitions})
        for name, future in self._admin.describe_topics(
            TopicCollection(names), request_timeout=TIMEOUT_SECONDS
        ).items():
            try:
                topics[name] = future.result()
            except KafkaException as error:
                unknown |= {at: _log_unknown(at, error) for at in partitions if at.topic == name}
        known = [at for at in partitions if at.topic in topics]
        starts = self._offsets(known, OffsetSpec.earliest(), unknown)  # type: ignore[no-untyped-call]
        ends = self._offsets(starts, OffsetSpec.latest(), unknown)  # type: ignore[no-untyped-call]
        logs = {}
        for at, end in ends.items():
            topic = topics[at.topic]
            logs[at] = Log(_id(topic), starts[at], end, len(topic.partitions))
        return logs, unknown

    def first_at(self, partitions: Sequence[Partition], timestamp_ms: int) -> tuple[dict[Partition, int], Unknown]:
        """Return the first offset with a record of this time or later; -1 where there is none."""
        unknown: Unknown = {}
        return self._offsets(partitions, OffsetSpec.for_timestamp(timestamp_ms), unknown), unknown

    def last_stable(self, partitions: Sequence[Partition]) -> tuple[dict[Partition, int], Unknown]:
        """Return where the records end that no open transaction can change any more."""
        unknown: Unknown = {}
        stable = IsolationLevel.READ_COMMITTED
        return self._offsets(partitions, OffsetSpec.latest(), unknown, isolation_level=stable), unknown  # type: ignore[no-untyped-call]

    def committed(self, partitions: Sequence[Partition]) -> tuple[dict[Partition, CommittedOffset | None], Unknown]:
        """Return the group's offsets once no open transaction can change them; raise BatchAborted while one could."""
        try:
            answers = self._reader.committed(
                [TopicPartition(partition.topic, partition.number) for partition in partitions], TIMEOUT_SECONDS
            )
        except KafkaException as error:
            raise BatchAborted(f"the committed offsets could not be read: {error.args[0].str()}") from None
        found: dict[Partition, CommittedOffset | None] = {}
        unknown: Unknown = {}
        for answer in answers:
            partition = Partition(answer.topic, answer.partition)
            if answer.error is not None:
                unknown[partition] = f"{partition}: the committed offset could not be read: {answer.error.str()}"
                continue
            found[partition] = (
                None if answer.offset == OFFSET_INVALID else CommittedOffset(answer.offset, answer.metadata or "")
            )
        return found, unknown

    def move(self, offsets: Mapping[Partition, tuple[int, str]]) -> None:
        """Commit these offsets, each with its metadata; the brokers refuse while the group has members."""
        wanted = [TopicPartition(at.topic, at.number, offset, text) for at, (offset, text) in offsets.items()]
        client = outsider(self._settings, self._group)
        try:
            done = client.commit(offsets=wanted, asynchronous=False) or []
            refused = next((one.error for one in done if one.error is not None), None)
        except KafkaException as error:
            refused = error.args[0]
        finally:
            client.close()
        if refused is not None:
            raise SetupError(f"the brokers did not take the offsets: {refused.str()}; is the service running again?")

    def close(self) -> None:
        self._reader.close()

    def _offsets(
        self, partitions: Iterable[Partition], spec: OffsetSpec, unknown: Unknown, **how: Any
    ) -> dict[Partition, int]:
        asked = {TopicPartition(partition.topic, partition.number): spec for partition in partitions}
        found = {}
        for at, future in (
            self._admin.list_offsets(asked, request_timeout=TIMEOUT_SECONDS, **how).items() if asked else ()
        ):
            partition = Partition(at.topic, at.partition)
            try:
                found[partition] = future.result().offset
            except KafkaException as error:
                unknown[partition] = _log_unknown(partition, error)
        return found


def _log_unknown(partition: Partition, error: KafkaException) -> str:
    return f"{partition}: the brokers do not report where its log begins and ends: {error.args[0].str()}"
