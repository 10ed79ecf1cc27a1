"""What can be read of topics now: where each partition begins, where committed readers end, what compaction may take.

All calls block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # exported, not declared so
    AdminClient,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)

from processor.errors import SetupError
from processor.kafka import connections
from processor.messages.message import Partition

if TYPE_CHECKING:
    from processor.settings.kafka import KafkaSettings

ASK_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Extent:
    """The offsets of one partition that a reader of committed records can get now."""

    topic_id: str
    start: int
    end: int


class Extents:
    def __init__(self, settings: KafkaSettings) -> None:
        self._admin = AdminClient(settings.admin_config(), logger=connections.silent)

    def of(self, topics: Iterable[str]) -> dict[Partition, Extent]:
        ids = self._topic_ids(topics)
        starts = self._offsets(ids, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
        ends = self._offsets(ids, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        return {at: Extent(ids[at], starts[at], ends[at]) for at in sorted(ids)}

    def at_time(self, partitions: Collection[Partition], timestamp_ms: int) -> dict[Partition, int | None]:
        """The first offset with this timestamp or a later one in each partition; None if there is none."""
        found = self._offsets(partitions, OffsetSpec.for_timestamp(timestamp_ms))
        return {at: offset if offset >= 0 else None for at, offset in found.items()}

    def may_lose(self, topics: Iterable[str]) -> list[str]:
        """Topics from whose middle records may be gone: compacted ones, and those that may not be asked about."""
        asked = [ConfigResource(ResourceType.TOPIC, topic) for topic in sorted(set(topics))]
        found = []
        for resource, answer in (
            self._admin.describe_configs(asked, request_timeout=ASK_SECONDS).items() if asked else ()
        ):
            try:
                policy = answer.result()["cleanup.policy"].value
            except (KafkaException, KeyError):
                policy = "compact"
            if "compact" in str(policy):
                found.append(str(resource.name))
        return found

    def _topic_ids(self, topics: Iterable[str]) -> dict[Partition, str]:
        names = sorted(set(topics))
        found: dict[Partition, str] = {}
        asked = self._admin.describe_topics(TopicCollection(names), request_timeout=ASK_SECONDS) if names else {}
        for name, answer in asked.items():
            try:
                topic = answer.result()
            except KafkaException as error:
                if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise SetupError(f"topic {name} does not exist") from None
                raise SetupError(f"the brokers do not describe topic {name}: {error.args[0].str()}") from None
            # As Kafka's own tools write it; librdkafka uses another base64 alphabet.
            id_ = str(topic.topic_id).replace("+", "-").replace("/", "_")
            found |= {Partition(name, partition.id): id_ for partition in topic.partitions}
        return found

    def _offsets(self, partitions: Collection[Partition], spec: OffsetSpec) -> dict[Partition, int]:
        if not partitions:
            return {}
        asked = {TopicPartition(at.topic, at.number): spec for at in partitions}
        found = {}
        answers = self._admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=ASK_SECONDS
        )
        for at, answer in answers.items():
            partition = Partition(at.topic, at.partition)
            try:
                found[partition] = answer.result().offset
            except KafkaException as error:
                raise SetupError(
                    f"{partition}: the brokers do not report where its log begins and ends: {error.args[0].str()}"
                ) from None
        return found
