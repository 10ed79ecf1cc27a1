"""A group's offsets, moved as an operator moves them."""

from __future__ import annotations

from confluent_kafka import Consumer, TopicPartition

from tests.support.bench import Bench


def set_offset(bench: Bench, offset: int, partition: int = 0) -> None:
    """As kafka-consumer-groups --reset-offsets does: a plain commit, without metadata, to an empty group."""
    consumer = Consumer({"bootstrap.servers": bench.bootstrap_servers, "group.id": bench.consumer, "log_level": 0})
    consumer.commit(offsets=[TopicPartition(bench.input, partition, offset)], asynchronous=False)
    consumer.close()
