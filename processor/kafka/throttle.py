"""Which partitions are paused because the buffer is full."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from confluent_kafka import TopicPartition

if TYPE_CHECKING:
    from confluent_kafka import Consumer

    from processor.kafka.assignment import Assignment
    from processor.messages.message import Partition


class Throttle:
    """Pauses and resumes partitions; for the poll thread alone.

    A pause discards what librdkafka has fetched ahead, so where all partitions have a backlog, the thread waits a
    moment for room first. But while some are up to date, those with a backlog are paused at once: records of the others
    must not wait behind it, as long as they take no more than half of the buffer.
    """

    def __init__(self, consumer: Consumer, limit: int) -> None:
        self._consumer = consumer
        self._limit = limit
        self.paused: set[Partition] = set()

    def adjust(self, buffered_bytes: int, fetching: Collection[Assignment]) -> bool:
        """Return whether the thread has to wait for room before it reads on."""
        if self.paused and buffered_bytes <= self._limit // 2:
            self._consumer.resume(_places(self.paused))
            self.paused = set()
        if buffered_bytes < self._limit:
            return False
        current = [assignment for assignment in fetching if assignment.current]
        if current and sum(assignment.buffer.bytes for assignment in current) < self._limit // 2:
            self.pause({assignment.partition for assignment in fetching if not assignment.current})
            return False
        return any(assignment.partition not in self.paused for assignment in fetching)

    def pause(self, partitions: Iterable[Partition]) -> None:
        new = set(partitions) - self.paused
        if new:
            self._consumer.pause(_places(new))
            self.paused |= new

    def forget(self, partition: Partition) -> None:
        """Resume a partition that will not be read: it would still be paused when it is assigned again."""
        if partition in self.paused:
            self._consumer.resume(_places([partition]))
            self.paused.discard(partition)


def _places(partitions: Iterable[Partition]) -> list[TopicPartition]:
    return [TopicPartition(partition.topic, partition.number) for partition in partitions]
