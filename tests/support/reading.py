"""What any downstream consumer gets to see of a topic, read by `read_committed` and by nothing of the processor's."""

from __future__ import annotations

import uuid

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition
from confluent_kafka.admin import AdminClient

READ_SECONDS = 30.0

Headers = list[tuple[str, bytes | None]]


def read_all(bootstrap_servers: str, topic: str) -> list[Message]:
    """Every record that a read_committed reader gets to see now."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": f"reader-{uuid.uuid4().hex}",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,
            "log_level": 0,
        }
    )
    try:
        waiting = set(partitions(AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0}), topic))
        consumer.assign([TopicPartition(topic, partition, 0) for partition in waiting])
        found: list[Message] = []
        while waiting:
            first = consumer.poll(READ_SECONDS)
            assert first is not None, f"{topic}: no answer within {READ_SECONDS:g} s"
            for message in (first, *consumer.consume(10_000, 0)):
                error = message.error()
                if error is None:
                    found.append(message)
                elif error.code() == KafkaError._PARTITION_EOF:
                    waiting.discard(partition_of(message))
                else:
                    raise AssertionError(f"{topic} could not be read: {error.str()}")
        return found
    finally:
        consumer.close()


def partitions(admin: AdminClient, topic: str) -> list[int]:
    found = admin.list_topics(topic, timeout=READ_SECONDS).topics[topic]
    assert found.error is None, f"{topic}: {found.error}"  # it would look like a topic with nothing in it
    return sorted(found.partitions)


def partition_of(message: Message) -> int:
    partition = message.partition()
    assert partition is not None
    return partition


def offset_of(message: Message) -> int:
    offset = message.offset()
    assert offset is not None
    return offset


def headers_of(message: Message) -> Headers:
    found: list[tuple[str, bytes | None]] = list(message.headers() or ())  # type: ignore[arg-type]
    return found


def header(message: Message, name: str) -> str | None:
    value = dict(headers_of(message)).get(name)
    return value.decode() if isinstance(value, bytes) else None
