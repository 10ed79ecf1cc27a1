"""Rewinds to where messages are forgotten: which there are, and an operator's word that they are to be handled again.

The engine halts a partition whose committed offset lies below its watermark. What is accepted here holds for that
partition, that offset and one rewind: the next recovery uses it up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from processor.errors import BatchAborted
from processor.messages.message import Partition
from processor.postgres import pruning, retention
from processor.postgres.retention import NOTHING_FORGOTTEN

if TYPE_CHECKING:
    from processor.kafka.cluster import Cluster
    from processor.postgres.session import Connection


@dataclass(frozen=True, slots=True)
class Rewind:
    """A partition whose committed offset lies below what it remembers."""

    topic: str
    partition: int
    offset: int  # from which it would be read again
    next_offset: int  # where its work stands
    remembered_from: int

    @property
    def again_below(self) -> int:
        """Messages from `offset` up to here would be handled as if they were new."""
        return min(self.remembered_from, self.next_offset)


async def find(connection: Connection, consumer: str, topics: Sequence[str], cluster: Cluster) -> list[Rewind]:
    """The rewinds that the engine would refuse."""
    marks = await retention.watermarks(connection, consumer)
    stands = {Partition(one.topic, one.partition): one for one in await pruning.partitions(connection, consumer)}
    asked = [partition for partition in stands if partition.topic in topics]
    committed, unknown = cluster.committed(asked) if asked else ({}, {})
    if unknown:
        raise BatchAborted("; ".join(unknown.values()))
    found = []
    for partition in asked:
        at, next_offset = committed[partition], stands[partition].next_offset
        mark = marks.get(partition, NOTHING_FORGOTTEN)
        if at is not None and at.offset < next_offset and not mark.allows(at.offset):
            found.append(Rewind(partition.topic, partition.number, at.offset, next_offset, mark.below))
    return found


async def accept(connection: Connection, consumer: str, rewinds: Sequence[Rewind], by: str) -> None:
    """Let the service read again from these offsets."""
    async with connection.transaction(isolation="read_committed"):
        for one in rewinds:
            await retention.accept(connection, consumer, Partition(one.topic, one.partition), one.offset, by)
