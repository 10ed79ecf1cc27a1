"""Topics that were deleted and created anew: how a consumer begins with the new one, and what it keeps of the old one.

Their offsets name other records now, so the engine halts until an operator has decided. Then each partition gets a new
name in the inbox (`ledger.partition_id`) and begins at the start of its log. What the inbox has of the old topic stays
as it is, under the old name, and dlq finds it; outputs that Kafka is not known to have are sent by the next owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from processor.errors import BatchAborted, SetupError
from processor.messages.message import Partition
from processor.postgres import topic_recreated
from processor.postgres.topic_recreated import Beginning

if TYPE_CHECKING:
    from processor.kafka.cluster import Cluster, Topic
    from processor.postgres.session import Connection


@dataclass(slots=True)
class Recreated:
    """A topic that is not the one the ledger knows under its name."""

    name: str
    known_id: str
    id: str
    partitions: list[int] = field(default_factory=list)
    partition_ids: list[int] = field(default_factory=list)  # their names in the inbox until now
    unsent: int = 0  # batches of which Kafka is not known to have the outputs
    left: Counter[str] = field(default_factory=Counter)  # messages in the inbox that are not done, by status
    lost: int = 0  # those of them of which only the id is kept

    def places(self) -> list[Partition]:
        return [Partition(self.name, number) for number in self.partitions]


async def find(connection: Connection, consumer: str, topics: dict[str, Topic]) -> list[Recreated]:
    """Which of the topics, as they are now, differ from those the ledger knows."""
    found: dict[str, Recreated] = {}
    by_partition_id: dict[int, Recreated] = {}
    for known in await topic_recreated.known(connection, consumer, topics):
        now = topics[known.topic]
        if known.topic_id == now.id:
            continue
        if known.partition not in now.partitions:
            if known.unsent:
                raise SetupError(
                    f"{Partition(known.topic, known.partition)} is gone, and not all of its outputs are known to be "
                    f"sent: give {known.topic} as many partitions as it had"
                )
            continue
        one = found.setdefault(known.topic, Recreated(known.topic, known.topic_id, now.id))
        one.partitions.append(known.partition)
        one.partition_ids.append(known.partition_id)
        one.unsent += known.unsent
        by_partition_id[known.partition_id] = one
    for left in await topic_recreated.left(connection, by_partition_id):
        by_partition_id[left.partition_id].left[left.status] += left.number
        by_partition_id[left.partition_id].lost += left.number if left.lost else 0
    return list(found.values())


async def begin_anew(
    connection: Connection, consumer: str, found: Sequence[Recreated], cluster: Cluster, by: str
) -> int:
    """Let the consumer begin at the start of the new topics; returns how many partitions were changed."""
    logs, untold = cluster.logs([place for one in found for place in one.places()])
    if untold:
        raise BatchAborted("; ".join(untold.values()))
    partition_ids = [partition_id for one in found for partition_id in one.partition_ids]
    beginnings = [Beginning(place, log.topic_id, log.start) for place, log in logs.items()]
    return await topic_recreated.begin_anew(connection, consumer, partition_ids, beginnings, by)
