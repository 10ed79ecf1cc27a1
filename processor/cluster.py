"""What the brokers say: which topics exist, where their logs begin and end, what a group has committed.

Blocking calls; the engine makes them off the event loop.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # exported, not declared so

from processor.errors import BatchAborted
from processor.records import Partition
from processor.recovery import Committed, Log

if TYPE_CHECKING:
    from processor.config import KafkaSettings

TIMEOUT_SECONDS = 10.0


class Cluster:
    def __init__(self, settings: KafkaSettings, group: str) -> None:
        logger = logging.getLogger("librdkafka")
        self._admin = AdminClient(settings.admin_config(), logger=logger)
        # Never joins the group, it only asks about it. The AdminClient can be asked too, but librdkafka 2.16
        # crashes in there when the group's coordinator is just moving or loading.
        self._reader = Consumer(settings.consumer_config(group), logger=logger)
        self._known: frozenset[str] = frozenset()

    def missing(self, topics: Iterable[str]) -> set[str]:
        """Those of the topics that do not exist. Asks the brokers only about names not seen before."""
        wanted = set(topics)
        if not wanted <= self._known:
            try:
                self._known = frozenset(self._admin.list_topics(timeout=TIMEOUT_SECONDS).topics)
            except KafkaException as error:
                raise BatchAborted(f"the brokers do not answer: {error.args[0].str()}") from None
        return wanted - self._known

    def knows(self, topics: Iterable[str]) -> bool:
        """Whether `missing` would answer at once that all exist."""
        return self._known.issuperset(topics)

    def logs(self, partitions: Sequence[Partition]) -> dict[Partition, Log]:
        try:
            ids = {
                name: str(future.result().topic_id)
                for name, future in self._admin.describe_topics(
                    TopicCollection(sorted({partition.topic for partition in partitions})),
                    request_timeout=TIMEOUT_SECONDS,
                ).items()
            }
            starts = self._offsets(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call]
            ends = self._offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call]
        except KafkaException as error:
            raise BatchAborted(f"the brokers do not say where the logs stand: {error.args[0].str()}") from None
        return {partition: Log(ids[partition.topic], starts[partition], ends[partition]) for partition in partitions}

    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, Committed | None]:
        """The group's offsets, once no open transaction can change them any more; BatchAborted while one could."""
        try:
            answers = self._reader.committed(
                [TopicPartition(partition.topic, partition.number) for partition in partitions], TIMEOUT_SECONDS
            )
        except KafkaException as error:
            raise BatchAborted(f"the committed offsets could not be read: {error.args[0].str()}") from None
        found: dict[Partition, Committed | None] = {}
        for answer in answers:
            partition = Partition(answer.topic, answer.partition)
            if answer.error is not None:
                raise BatchAborted(f"{partition}: the committed offset could not be read: {answer.error.str()}")
            found[partition] = (
                None if answer.offset == OFFSET_INVALID else Committed(answer.offset, answer.metadata or "")
            )
        return found

    def close(self) -> None:
        self._reader.close()

    def _offsets(self, partitions: Sequence[Partition], spec: OffsetSpec) -> dict[Partition, int]:
        futures = self._admin.list_offsets(
            {TopicPartition(partition.topic, partition.number): spec for partition in partitions},
            request_timeout=TIMEOUT_SECONDS,
        )
        return {Partition(at.topic, at.partition): future.result().offset for at, future in futures.items()}
