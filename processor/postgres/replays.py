"""Replays: what was asked for, which ranges they go over, and how far they have come.

The SQL of the tables replays and replay_ranges is here. A replay's position is in its own rows of the ledger, which the
engine moves as it moves any other; what it counts is added in the same transaction.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from processor.messages.message import Partition

if TYPE_CHECKING:
    from processor.postgres.session import Connection

UNFINISHED = ("active", "paused")

# Offsets in Kafka that an earlier replay of this name has left, for another database, have older epochs: they count as
# none. Hence epochs begin with the time.
CREATE = """
    WITH asked AS (
        INSERT INTO replays (consumer, name, plan, history) VALUES ($1, $2, $4, $5)
        ON CONFLICT DO NOTHING RETURNING 1
    ), own AS (
        INSERT INTO ledger (consumer, topic, partition, epoch, first_epoch, topic_id, partitions, first_offset,
                            next_offset, owner)
        SELECT $3, r.topic, r.partition, t.epoch, t.epoch, r.topic_id, r.partitions, r.first, r.first, 'nobody yet'
        FROM asked, unnest($6::text[], $7::integer[], $8::text[], $9::integer[], $10::bigint[])
             AS r(topic, partition, topic_id, partitions, first),
             (SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint) AS t(epoch)
        RETURNING topic, partition, partition_id
    )
    INSERT INTO replay_ranges (partition_id, consumer, name, live_partition_id, first_offset, end_offset,
                               applied_below, silent_below)
    SELECT own.partition_id, $1, $2, r.live, r.first, r.end_offset, r.applied_below, r.silent_below
    FROM own
    JOIN unnest($6::text[], $7::integer[], $10::bigint[], $11::bigint[], $12::integer[], $13::bigint[], $14::bigint[])
         AS r(topic, partition, first, end_offset, live, applied_below, silent_below)
         ON r.topic = own.topic AND r.partition = own.partition
    RETURNING 1
"""

FIND = """
    SELECT name, state, plan::text, history::text FROM replays
    WHERE consumer = $1 AND ($2::text IS NULL OR name = $2) ORDER BY history -> 0 ->> 'at', name
"""

RANGES = """
    SELECT r.name, l.topic, l.partition, l.topic_id, l.partitions, r.live_partition_id, r.first_offset, r.end_offset,
           r.applied_below, r.silent_below, r.partition_id, l.next_offset, r.processed, r.skipped, r.failed, r.outputs,
           EXISTS (SELECT FROM unsent u WHERE u.partition_id = r.partition_id) AS unsent
    FROM replay_ranges r JOIN ledger l ON l.partition_id = r.partition_id
    WHERE r.consumer = $1 AND ($2::text IS NULL OR r.name = $2) ORDER BY r.name, l.topic, l.partition
"""

UNDER_WAY = """
    SELECT p.name, p.state, p.plan ->> 'mode' AS mode,
           coalesce(sum(least(l.next_offset, r.end_offset) - r.first_offset), 0)::bigint AS offsets_done,
           coalesce(sum(r.end_offset - r.first_offset), 0)::bigint AS offsets
    FROM replays p
    LEFT JOIN replay_ranges r ON r.consumer = p.consumer AND r.name = p.name
    LEFT JOIN ledger l ON l.partition_id = r.partition_id
    WHERE p.consumer = $1 AND p.state = ANY ($2::text[]) GROUP BY p.consumer, p.name ORDER BY p.name
"""

STATE = "SELECT state FROM replays WHERE consumer = $1 AND name = $2"

# Only a state that may be left is left: a second finger on the button changes nothing.
MOVE = """
    UPDATE replays SET state = $4, history = history || $5::jsonb
    WHERE consumer = $1 AND name = $2 AND state = ANY ($3::text[]) RETURNING 1
"""

# A cancellation waits for the batch that holds the row, and no batch commits after it: retention may then forget what
# the replay would have needed, however long its process takes to notice.
COUNT = """
    WITH unfinished AS (
        SELECT FROM replays WHERE consumer = $1 AND name = $2 AND state IN ('active', 'paused') FOR SHARE
    )
    UPDATE replay_ranges r
    SET processed = r.processed + c.processed, skipped = r.skipped + c.skipped, failed = r.failed + c.failed,
        outputs = r.outputs + c.outputs
    FROM unnest($3::integer[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bigint[])
         AS c(partition_id, processed, skipped, failed, outputs)
    WHERE r.partition_id = c.partition_id AND EXISTS (SELECT FROM unfinished)
    RETURNING 1
"""

LOWEST_NEEDED = """
    SELECT r.live_partition_id, min(l.next_offset) AS lowest
    FROM replays p
    JOIN replay_ranges r ON r.consumer = p.consumer AND r.name = p.name
    JOIN ledger l ON l.partition_id = r.partition_id AND l.next_offset < r.end_offset
    WHERE p.consumer = $1 AND p.state IN ('active', 'paused') AND p.plan ->> 'mode' <> 're-apply'
    GROUP BY r.live_partition_id
"""

LIVE = """
    SELECT topic, partition, topic_id, next_offset, partition_id, first_epoch FROM ledger
    WHERE consumer = $1 ORDER BY topic, partition
"""


@dataclass(frozen=True, slots=True)
class Range:
    """What a replay is to go over in one partition."""

    partition: Partition
    topic_id: str
    partitions: int  # of the topic
    live_id: int  # ledger.partition_id of the live service
    first: int
    end: int
    applied_below: int  # the live service had applied everything below when the replay was made
    silent_below: int  # outputs of records from there to here are in Kafka already

    @property
    def silent(self) -> range:
        return range(self.applied_below, self.silent_below)


@dataclass(frozen=True, slots=True)
class Progress(Range):
    """How far a replay has come in one partition."""

    ledger_id: int
    position: int
    processed: int
    skipped: int
    failed: int
    outputs: int
    unsent: bool  # it has stored outputs that Kafka is not known to have

    @property
    def done(self) -> bool:
        return self.position >= self.end and not self.unsent


@dataclass(frozen=True, slots=True)
class Replay:
    name: str
    state: str
    plan: dict[str, Any]
    history: Sequence[dict[str, Any]]
    ranges: Sequence[Progress]


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A replay that has not ended, in short."""

    name: str
    state: str
    mode: str
    offsets_done: int
    offsets: int  # in all its ranges


class Counted(NamedTuple):
    """What a batch has come to in one partition."""

    ledger_id: int
    processed: int
    skipped: int
    failed: int
    outputs: int


class Live(NamedTuple):
    """A partition of the live service."""

    topic_id: str
    position: int
    ledger_id: int
    first_epoch: int


async def live(connection: Connection, consumer: str) -> dict[Partition, Live]:
    """Return where the live service stands."""
    return {
        Partition(row["topic"], row["partition"]): Live(
            row["topic_id"], row["next_offset"], row["partition_id"], row["first_epoch"]
        )
        for row in await connection.fetch(LIVE, consumer)
    }


async def create(
    connection: Connection,
    consumer: str,
    name: str,
    ledger_name: str,
    plan: Mapping[str, Any],
    event: Mapping[str, Any],
    ranges: Sequence[Range],
) -> bool:
    """Write a replay down, with its positions at their beginnings; False if one has this name already."""
    made = await connection.fetchval(
        CREATE,
        consumer,
        name,
        ledger_name,
        orjson.dumps(plan).decode(),
        orjson.dumps([event]).decode(),
        [one.partition.topic for one in ranges],
        [one.partition.number for one in ranges],
        [one.topic_id for one in ranges],
        [one.partitions for one in ranges],
        [one.first for one in ranges],
        [one.end for one in ranges],
        [one.live_id for one in ranges],
        [one.applied_below for one in ranges],
        [one.silent_below for one in ranges],
    )
    return made is not None


async def find(connection: Connection, consumer: str, name: str | None = None) -> list[Replay]:
    """Return the replays of a consumer, or the one of this name, in the order in which they were made."""
    ranges: dict[str, list[Progress]] = {}
    for of, topic, number, *rest in await connection.fetch(RANGES, consumer, name):
        ranges.setdefault(of, []).append(Progress(Partition(topic, number), *rest))
    return [
        Replay(
            row["name"],
            row["state"],
            orjson.loads(row["plan"]),
            orjson.loads(row["history"]),
            ranges.get(row["name"], []),
        )
        for row in await connection.fetch(FIND, consumer, name)
    ]


async def under_way(connection: Connection, consumer: str) -> list[UnderWay]:
    """Return the replays that have not ended, active or paused."""
    return [UnderWay(**row) for row in await connection.fetch(UNDER_WAY, consumer, list(UNFINISHED))]


async def state(connection: Connection, consumer: str, name: str) -> str | None:
    found: str | None = await connection.fetchval(STATE, consumer, name)
    return found


async def move(
    connection: Connection, consumer: str, name: str, before: Iterable[str], after: str, event: Mapping[str, Any]
) -> bool:
    """Bring a replay into another state and write down who did it; False if it was in none of those `before`."""
    text = orjson.dumps([event]).decode()
    return await connection.fetchval(MOVE, consumer, name, list(before), after, text) is not None


async def count(connection: Connection, consumer: str, name: str, counted: Sequence[Counted]) -> bool:
    """Add what a batch has come to, in its transaction; False if the replay was ended meanwhile."""
    columns = (list(column) for column in zip(*counted, strict=True))
    return await connection.fetchval(COUNT, consumer, name, *columns) is not None


async def lowest_needed(connection: Connection, consumer: str) -> Mapping[int, int]:
    """Return by ledger.partition_id of the live consumer the lowest offset that an unfinished replay still needs."""
    return {row["live_partition_id"]: row["lowest"] for row in await connection.fetch(LOWEST_NEEDED, consumer)}
