"""Topics that were deleted and created anew: how a consumer begins with the new one, and what it keeps of the old one.

Offsets name other records there, so the engine halts until an operator has said so. Then each partition gets a new
name in the inbox (`ledger.source`) and begins at the start of its log. What the inbox has of the old topic stays as it
is, under the old name, and dlq finds it; outputs that Kafka is not known to have are sent by the next owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from processor.errors import BatchAborted, SetupError
from processor.messages.message import Partition

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.kafka.cluster import Cluster, Topic

KNOWN = """
    SELECT topic, partition, topic_id, source,
           (SELECT count(*) FROM unsent WHERE unsent.source = ledger.source) AS unsent
    FROM ledger WHERE consumer = $1 AND topic = ANY ($2::text[]) ORDER BY topic, partition
"""

# The first condition is implied by the second, but only as it stands does it lead to the index inbox_unfinished.
LEFT = """
    SELECT source, status::text, headers IS NULL AS lost, count(*) FROM inbox
    WHERE source = ANY ($1::integer[]) AND status <> 'completed' AND status <> 'discarded' GROUP BY 1, 2, 3
"""

# Nobody is going to read these records again. Where the inbox has them, they have failed, and can be redriven; and what
# was redriven already was sent to the topic that is gone.
GIVE_TO_OPERATORS = """
    WITH locked AS (
        SELECT key FROM inbox
        WHERE source = ANY ($1::integer[]) AND status <> 'completed'
          AND (status IN ('failed', 'parked') AND redriven_at IS NOT NULL
               OR status IN ('pending', 'processing') AND headers IS NOT NULL)
        ORDER BY key FOR UPDATE
    )
    UPDATE inbox
    SET redriven_at = NULL, starts = NULL, lease_owner = NULL, lease_until = NULL,
        finished_at = CASE WHEN status IN ('failed', 'parked') THEN finished_at ELSE clock_timestamp() END,
        status = CASE WHEN status IN ('failed', 'parked') THEN status ELSE 'failed' END,
        history = coalesce(history, '[]')
                  || jsonb_build_object('at', clock_timestamp(), 'event', 'topic_recreated', 'by', $2::text)
    FROM locked WHERE inbox.key = locked.key
"""

# The epoch shuts out whoever still works on the old topic. `first_offset` is 0 so that all stored outputs are sent.
BEGIN_ANEW = """
    WITH old AS (
        SELECT l.source, p.topic_id, p.start FROM ledger l
        JOIN unnest($2::text[], $3::integer[], $4::text[], $5::bigint[]) AS p(topic, partition, topic_id, start)
             ON l.topic = p.topic AND l.partition = p.partition
        WHERE l.consumer = $1 AND l.topic_id <> p.topic_id
        ORDER BY l.topic, l.partition FOR UPDATE OF l
    )
    UPDATE ledger l
    SET source = DEFAULT, former = l.former || l.source, topic_id = old.topic_id, epoch = l.epoch + 1,
        first_epoch = l.epoch + 1, first_offset = 0, next_offset = old.start, starts = 0, trying = NULL,
        suspect = NULL, deaths = 0, updated_at = now()
    FROM old WHERE l.source = old.source
    RETURNING old.source AS before, l.source, l.next_offset
"""

# In their order, and below the position, as everything is that is still to be sent.
MOVE_UNSENT = """
    WITH moved AS (
        SELECT u.source, u.next_offset, p.source AS to_source,
               p.position + 1 - row_number() OVER (PARTITION BY u.source ORDER BY u.next_offset DESC) AS to_offset
        FROM unsent u JOIN unnest($1::integer[], $2::integer[], $3::bigint[]) AS p(before, source, position)
             ON u.source = p.before
    )
    UPDATE unsent u SET source = moved.to_source, next_offset = moved.to_offset
    FROM moved WHERE u.source = moved.source AND u.next_offset = moved.next_offset
"""


@dataclass(slots=True)
class Recreated:
    """A topic that is another one than the ledger knows."""

    name: str
    known_id: str
    id: str
    partitions: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)  # their names in the inbox until now
    unsent: int = 0  # batches of which Kafka is not known to have the outputs
    left: Counter[str] = field(default_factory=Counter)  # messages in the inbox that are not done, by status
    lost: int = 0  # those of them of which nothing but the id is kept

    def places(self) -> list[Partition]:
        return [Partition(self.name, number) for number in self.partitions]


async def find(connection: Connection[Row], consumer: str, topics: dict[str, Topic]) -> list[Recreated]:
    """Which of the topics, as they are now, are others than the ledger knows."""
    found: dict[str, Recreated] = {}
    by_source: dict[int, Recreated] = {}
    for row in await connection.fetch(KNOWN, consumer, list(topics)):
        name, now = row["topic"], topics[row["topic"]]
        if row["topic_id"] == now.id:
            continue
        if row["partition"] not in now.partitions:
            if row["unsent"]:
                raise SetupError(
                    f"{Partition(name, row['partition'])} is no more, and not all of its outputs are known to be sent: "
                    f"give {name} as many partitions as it had"
                )
            continue
        one = found.setdefault(name, Recreated(name, row["topic_id"], now.id))
        one.partitions.append(row["partition"])
        one.sources.append(row["source"])
        one.unsent += row["unsent"]
        by_source[row["source"]] = one
    for row in await connection.fetch(LEFT, list(by_source)):
        by_source[row["source"]].left[row["status"]] += row["count"]
        by_source[row["source"]].lost += row["count"] if row["lost"] else 0
    return list(found.values())


async def begin_anew(
    connection: Connection[Row], consumer: str, found: Sequence[Recreated], cluster: Cluster, by: str
) -> int:
    """Let the consumer begin at the start of the new topics; gives the number of partitions that were changed.

    All or nothing, and nothing is left to do for whoever comes second.
    """
    logs, untold = cluster.logs([place for one in found for place in one.places()])
    if untold:
        raise BatchAborted("; ".join(untold.values()))
    async with connection.transaction(isolation="read_committed"):
        places = list(logs)
        numbers = [place.number for place in places]
        names = [place.topic for place in places]
        ids, starts = [logs[place].topic_id for place in places], [logs[place].start for place in places]
        await connection.execute(GIVE_TO_OPERATORS, [source for one in found for source in one.sources], by)
        moved = await connection.fetch(BEGIN_ANEW, consumer, names, numbers, ids, starts)
        columns = [[row[name] for row in moved] for name in ("before", "source", "next_offset")]
        await connection.execute(MOVE_UNSENT, *columns)
    return len(moved)
