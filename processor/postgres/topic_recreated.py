"""The statements that let a consumer begin with a topic that was deleted and created anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from processor.messages.message import Partition

if TYPE_CHECKING:
    from processor.postgres.session import Connection

KNOWN = """
    SELECT topic, partition, topic_id, partition_id,
           (SELECT count(*) FROM unsent WHERE unsent.partition_id = ledger.partition_id) AS unsent
    FROM ledger WHERE consumer = $1 AND topic = ANY ($2::text[]) ORDER BY topic, partition
"""

# The first condition follows from the second, but Postgres uses the index inbox_unfinished only where it is written.
LEFT = """
    SELECT partition_id, status::text, headers IS NULL AS lost, count(*) AS number FROM inbox
    WHERE partition_id = ANY ($1::integer[]) AND status <> 'completed' AND status <> 'discarded' GROUP BY 1, 2, 3
"""

# Nobody will read these records again. A message that the inbox holds becomes a failed one, which can be redriven; and
# a message that was redriven was sent to the topic that is gone, so it has to be sent again.
GIVE_TO_OPERATORS = """
    WITH locked AS (
        SELECT key FROM inbox
        WHERE partition_id = ANY ($1::integer[]) AND status <> 'completed'
          AND (status IN ('failed', 'parked') AND redriven_at IS NOT NULL
               OR status IN ('pending', 'processing') AND headers IS NOT NULL)
        ORDER BY key FOR UPDATE
    )
    UPDATE inbox
    SET redriven_at = NULL, unfinished = NULL, lease_owner = NULL, lease_until = NULL,
        finished_at = CASE WHEN status IN ('failed', 'parked') THEN finished_at ELSE clock_timestamp() END,
        status = CASE WHEN status IN ('failed', 'parked') THEN status ELSE 'failed' END,
        history = coalesce(history, '[]')
                  || jsonb_build_object('at', clock_timestamp(), 'event', 'topic_recreated', 'by', $2::text)
    FROM locked WHERE inbox.key = locked.key
"""

# The epoch shuts out an owner that still works on the old topic. `first_offset` is 0 so that all stored outputs are
# sent.
BEGIN_ANEW = """
    WITH old AS (
        SELECT l.partition_id, p.topic_id, p.start FROM ledger l
        JOIN unnest($2::text[], $3::integer[], $4::text[], $5::bigint[]) AS p(topic, partition, topic_id, start)
             ON l.topic = p.topic AND l.partition = p.partition
        WHERE l.consumer = $1 AND l.topic_id <> p.topic_id
        ORDER BY l.topic, l.partition FOR UPDATE OF l
    )
    UPDATE ledger l
    SET partition_id = DEFAULT, former = l.former || l.partition_id, topic_id = old.topic_id, epoch = l.epoch + 1,
        first_epoch = l.epoch + 1, first_offset = 0, next_offset = old.start, unfinished_owners = 0, in_progress = NULL,
        suspects = NULL, deaths = 0, updated_at = now()
    FROM old WHERE l.partition_id = old.partition_id
    RETURNING old.partition_id AS before, l.partition_id, l.next_offset
"""

# In their order, and below the position, where all outputs lie that are still to be sent.
MOVE_UNSENT = """
    WITH moved AS (
        SELECT u.partition_id, u.next_offset, p.partition_id AS to_partition_id,
               p.position + 1 - row_number() OVER (PARTITION BY u.partition_id ORDER BY u.next_offset DESC) AS to_offset
        FROM unsent u JOIN unnest($1::integer[], $2::integer[], $3::bigint[]) AS p(before, partition_id, position)
             ON u.partition_id = p.before
    )
    UPDATE unsent u SET partition_id = moved.to_partition_id, next_offset = moved.to_offset
    FROM moved WHERE u.partition_id = moved.partition_id AND u.next_offset = moved.next_offset
"""


class Known(NamedTuple):
    """A partition in the ledger."""

    topic: str
    partition: int
    topic_id: str
    partition_id: int
    unsent: int  # batches of which Kafka is not known to have the outputs


class Left(NamedTuple):
    """Messages of one partition that are not done."""

    partition_id: int
    status: str
    lost: bool  # only their ids are kept
    number: int


class Beginning(NamedTuple):
    """Where the log of a partition starts, and which topic it belongs to."""

    partition: Partition
    topic_id: str
    start: int


async def known(connection: Connection, consumer: str, topics: Iterable[str]) -> list[Known]:
    return [Known._make(row) for row in await connection.fetch(KNOWN, consumer, list(topics))]


async def left(connection: Connection, partition_ids: Iterable[int]) -> list[Left]:
    return [Left._make(row) for row in await connection.fetch(LEFT, list(partition_ids))]


async def begin_anew(
    connection: Connection, consumer: str, partition_ids: Sequence[int], beginnings: Sequence[Beginning], by: str
) -> int:
    """All or nothing; returns how many partitions were changed, which is none for the second of two callers."""
    columns = [
        [beginning.partition.topic for beginning in beginnings],
        [beginning.partition.number for beginning in beginnings],
        [beginning.topic_id for beginning in beginnings],
        [beginning.start for beginning in beginnings],
    ]
    async with connection.transaction(isolation="read_committed"):
        await connection.execute(GIVE_TO_OPERATORS, partition_ids, by)
        moved = await connection.fetch(BEGIN_ANEW, consumer, *columns)
        places = [[row[name] for row in moved] for name in ("before", "partition_id", "next_offset")]
        await connection.execute(MOVE_UNSENT, *places)
    return len(moved)
