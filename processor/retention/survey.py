"""What may be forgotten now: asks both systems, and changes nothing but the notes of where logs ended.

A message may go when nothing can come any more that is the same, as far as the retention's span promises that. A
duplicate that its producer has sent may still lie in a log, unread: so the span does not end now, but where the oldest
record that is not done yet may have arrived. A consumer that was down for longer than the span therefore finds every
id that can still come.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from processor.errors import BatchAborted
from processor.messages.message import Partition
from processor.postgres import pruning, replays, retention
from processor.postgres.pruning import ANY_OFFSET, Expired

if TYPE_CHECKING:
    from processor.kafka.cluster import Cluster
    from processor.messages.positions import CommittedOffset, Log
    from processor.postgres.pruning import Known
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings


# At most this often in a period it is noted where the logs end.
NOTES = 8


@dataclass(frozen=True, slots=True)
class Found:
    """What may go."""

    cutoff: datetime  # ids that were last read before this may be forgotten
    expired: Expired
    names: Mapping[int, Partition]  # by the partition_id of rows


@dataclass(frozen=True, slots=True)
class Held:
    """Nothing may go now."""

    reason: str


@dataclass(frozen=True, slots=True)
class Brokers:
    """What the brokers know."""

    logs: Mapping[Partition, Log]
    committed: Mapping[Partition, CommittedOffset | None]


async def survey(connection: Connection, settings: Settings, cluster: Cluster, *, dry: bool = False) -> Found | Held:
    """Find out what may go. With `dry`, even the notes stay as they are."""
    span, grain = settings.retention.span, settings.retention.grain
    assert span is not None
    assert grain is not None
    at = await retention.now(connection)  # before the brokers are asked: what they do not have yet arrives later
    ledger = await pruning.partitions(connection, settings.consumer)
    needed = await replays.lowest_needed(connection, settings.consumer)
    try:
        brokers = await asyncio.to_thread(_ask, cluster, settings.topics)
    except BatchAborted as error:
        return Held(str(error))
    read = {Partition(one.topic, one.partition): one for one in ledger if one.topic in settings.topics}
    if reason := unclear(read, brokers):
        return Held(reason)
    positions = {
        one.partition_id: position(one.next_offset, brokers.committed[partition], needed.get(one.partition_id))
        for partition, one in read.items()
    }
    ends = {one.partition_id: brokers.logs[partition].end for partition, one in read.items()}
    async with connection.transaction(isolation="read_committed"):
        since = await retention.arrived_since(connection, positions)
        bound = waiting_since(at, positions, ends, since)
        if not dry:
            await retention.note_log_ends(connection, settings.consumer, at, ends, settings.retention.period / NOTES)
            if isinstance(bound, datetime):
                await retention.forget_log_ends(connection, settings.consumer, bound - span)
    if not isinstance(bound, datetime):
        (name,) = [partition for partition, one in read.items() if one.partition_id == bound]
        return Held(f"{name}: records wait, and nobody noted when they arrived; once they are done, all is known")
    names, floors = _rows_of(ledger, positions)
    return Found(bound - span, Expired(floors, bound - span - grain), names)


async def behind(connection: Connection, settings: Settings, cluster: Cluster) -> bool:
    """Whether a process of the service has a whole batch waiting behind the one that it is at."""
    ledger = await pruning.partitions(connection, settings.consumer)
    read = {Partition(one.topic, one.partition): one for one in ledger if one.topic in settings.topics}
    ends, _unknown = await asyncio.to_thread(cluster.last_stable, list(read))
    waiting: Counter[str] = Counter()
    for partition, end in ends.items():
        waiting[read[partition].owner] += max(0, end - read[partition].next_offset)
    return any(number >= 2 * settings.batch.max_messages for number in waiting.values())


def position(next_offset: int, committed: CommittedOffset | None, needed: int | None) -> int:
    """Return the lowest offset that is still to be read, by the service or by a replay that has not ended.

    If an operator has moved the committed offset back, the ledger follows only when the service starts.
    """
    wanted = [next_offset, committed.offset if committed is not None else None, needed]
    return min(offset for offset in wanted if offset is not None)


def waiting_since(
    at: datetime, positions: Mapping[int, int], ends: Mapping[int, int], since: Mapping[int, datetime | None]
) -> datetime | int:
    """Return the time after which everything that is not done yet has arrived; or the partition that knows none.

    `since` has the notes: a time after which what lies at or above the position arrived. A partition without anything
    left to do needs no note.
    """
    bound = at
    for partition_id, offset in positions.items():
        if offset >= ends[partition_id]:
            continue
        noted = since[partition_id]
        if noted is None:
            return partition_id
        bound = min(bound, noted)
    return bound


def unclear(read: Mapping[Partition, Known], brokers: Brokers) -> str | None:
    """Return why nobody can say now what may still come; None if it is clear."""
    for partition, log in brokers.logs.items():
        known = read.get(partition)
        if known is None and log.end > log.start:
            return f"{partition}: has records, and this consumer has not begun to read it"
        if known is not None and known.topic_id != log.topic_id:
            return f"{partition}: the topic was deleted and created anew: `processor topic-recreated CONFIG`"
    for partition in read:
        if partition not in brokers.logs:
            return f"{partition}: does not exist any more"
    return None


def _rows_of(ledger: list[Known], positions: Mapping[int, int]) -> tuple[dict[int, Partition], dict[int, int]]:
    """Return names, and positions below which rows may go, by the partition_id of the rows; former ones included."""
    names: dict[int, Partition] = {}
    floors: dict[int, int] = {}
    for one in ledger:
        for partition_id in (one.partition_id, *one.former):
            names[partition_id] = Partition(one.topic, one.partition)
            floors[partition_id] = ANY_OFFSET
        floors[one.partition_id] = positions.get(one.partition_id, one.next_offset)
    return names, floors


def _ask(cluster: Cluster, topics: tuple[str, ...]) -> Brokers:
    found = cluster.topics(topics)
    if missing := set(topics) - found.keys():
        raise BatchAborted(f"topic {', '.join(sorted(missing))} does not exist")
    partitions = [Partition(name, number) for name, topic in found.items() for number in sorted(topic.partitions)]
    committed, unknown = cluster.committed(partitions)
    logs, more = cluster.logs(partitions)
    for reason in (*unknown.values(), *more.values()):
        raise BatchAborted(reason)
    return Brokers(logs, committed)
