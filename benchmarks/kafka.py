"""What the harness asks the broker: topics, the end of an output topic, and its records."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any

from confluent_kafka import (
    OFFSET_BEGINNING,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined] # exported, not declared
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    OffsetSpec,
    ResourceType,
)

from benchmarks import check
from benchmarks.errors import SILENT, BenchError

ADMIN_SECONDS = 30.0
READ_SECONDS = 120.0
# The largest message of `growth` and what Kafka adds to it.
MAX_MESSAGE_BYTES = 2 * 1024 * 1024


class Cluster:
    def __init__(self, bootstrap_servers: str) -> None:
        self.bootstrap_servers = bootstrap_servers
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers}, logger=SILENT)

    def create(self, name: str, partitions: int, **settings: str) -> None:
        """A topic that can be used when this returns."""
        config = {"max.message.bytes": str(MAX_MESSAGE_BYTES), **{k.replace("_", "."): v for k, v in settings.items()}}
        topic = NewTopic(name, partitions, config=config)
        for future in self._admin.create_topics([topic], operation_timeout=ADMIN_SECONDS).values():
            future.result()
        self._settle(name, partitions)

    def delete(self, name: str) -> None:
        for future in self._admin.delete_topics([name], operation_timeout=ADMIN_SECONDS).values():
            future.exception()

    def forget_group(self, name: str) -> None:
        """Delete its offsets, so that it reads from the beginning again; the group may not exist."""
        for future in self._admin.delete_consumer_groups([name], request_timeout=ADMIN_SECONDS).values():
            future.exception()

    def set_group(self, name: str, settings: Mapping[str, str]) -> None:
        """Set what the broker decides for members of this group under Kafka's newer protocol."""
        entries = [
            ConfigEntry(setting, value, incremental_operation=AlterConfigOpType.SET)
            for setting, value in settings.items()
        ]
        resource = ConfigResource(ResourceType.GROUP, name, incremental_configs=entries)
        for future in self._admin.incremental_alter_configs([resource], request_timeout=ADMIN_SECONDS).values():
            future.result()

    def topic_id(self, name: str) -> str:
        """As Kafka's own tools write it."""
        (future,) = self._admin.describe_topics(TopicCollection([name]), request_timeout=ADMIN_SECONDS).values()
        return str(future.result().topic_id).replace("+", "-").replace("/", "_")

    def ends(self, name: str, partitions: int) -> int:
        """Where committed readers stand at best, over all partitions. Markers of transactions count too."""
        futures = self._admin.list_offsets(
            {TopicPartition(name, number): OffsetSpec.latest() for number in range(partitions)},  # type: ignore[no-untyped-call]
            isolation_level=IsolationLevel.READ_COMMITTED,
            request_timeout=ADMIN_SECONDS,
        )
        return sum(future.result().offset for future in futures.values())

    def _settle(self, name: str, partitions: int) -> None:
        """Wait until the topic answers. A client that asks for offsets too early gets errors for a long time."""
        deadline = time.monotonic() + ADMIN_SECONDS
        while True:
            found = self._admin.list_topics(name, timeout=ADMIN_SECONDS).topics[name]
            leaders = [partition.leader for partition in found.partitions.values() if partition.leader >= 0]
            if found.error is None and len(leaders) == partitions:
                try:
                    self.ends(name, partitions)
                    return
                except KafkaException:
                    pass
            if time.monotonic() > deadline:
                raise BenchError(f"topic {name} has no leaders after {ADMIN_SECONDS:.0f} s")
            time.sleep(0.05)

    def reader(self, topic: str, partitions: int, **settings: Any) -> Consumer:
        """A committed reader of the whole topic; it belongs to no group."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": f"bench-reader-{uuid.uuid4().hex}",  # never joined, never committed to
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "error",
                **{name.replace("_", "."): value for name, value in settings.items()},
            },
            logger=SILENT,
        )
        consumer.assign([TopicPartition(topic, number, OFFSET_BEGINNING) for number in range(partitions)])
        return consumer

    def read(self, topic: str, partitions: int) -> tuple[list[check.Pair], list[int]]:
        """Every committed record up to the present end of the topic, and when the broker appended it, in ms."""
        consumer = self.reader(topic, partitions, enable_partition_eof=True, fetch_wait_max_ms=10)
        pairs: list[check.Pair] = []
        times: list[int] = []
        unfinished = set(range(partitions))
        deadline = time.monotonic() + READ_SECONDS
        try:
            while unfinished:
                if time.monotonic() > deadline:
                    raise BenchError(f"topic {topic} could not be read to its end within {READ_SECONDS:.0f} s")
                for message in consumer.consume(5000, 0.2):
                    error = message.error()
                    if error is None:
                        pairs.append(check.parse_output(message.key(), message.value()))
                        times.append(message.timestamp()[1])
                    elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                        unfinished.discard(message.partition())
                    elif not error.retriable():
                        raise BenchError(f"topic {topic}: {error.str()}")
        finally:
            consumer.close()
        return pairs, times
