"""The partitions of a process that has not begun to read."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import TypeAlias

import pytest

from processor.engine.partitions import OwnedPartition, Partitions
from processor.kafka.reader import PartitionReader
from processor.messages.decode import Decoder
from processor.messages.message import Partition
from processor.messages.types import MessageTypes
from tests.unit.engine.given import settings

TakeOver: TypeAlias = Callable[..., Sequence[OwnedPartition]]


@pytest.fixture
async def reader() -> AsyncIterator[PartitionReader]:
    """Never started: it knows what is assigned, and nobody polls."""
    reader = PartitionReader(settings(), Decoder(settings(), MessageTypes({})))
    yield reader
    reader._consumer.close()


@pytest.fixture
def partitions(reader: PartitionReader) -> Partitions:
    return Partitions(settings().failure, reader)


@pytest.fixture
def take_over(reader: PartitionReader, partitions: Partitions) -> TakeOver:
    """Have partitions of a topic assigned, and begin to read them."""

    def take_over(*numbers: int, offset: int = 0) -> Sequence[OwnedPartition]:
        reader.assign(Partition("orders", number) for number in numbers)
        new = partitions.take_new()
        for partition in new:
            partition.partition_id, partition.topic_id, partition.epoch = 7 + partition.partition.number, "topic-1", 3
            partition.recovered = True
            partitions.begin(partition, offset)
        return new

    return take_over
