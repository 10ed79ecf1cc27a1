"""What Postgres and Kafka say about each partition, put together: its state in a word, and why in a sentence. Pure.

The state table is in DESIGN.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from processor.messages.message import Partition

if TYPE_CHECKING:
    from processor.kafka.logs import End, Head
    from processor.messages.positions import CommittedOffset
    from processor.postgres.pruning import Latest
    from processor.postgres.replays import UnderWay
    from processor.postgres.retention import Watermark
    from processor.postgres.standing import Estimate, Noted, Rows, Standing

RUNNING, UNOWNED, NO_OWNER, UNKNOWN = "running", "unowned", "no owner", "unknown"
HALTED, RETRY = "halted", "retry"
_HELD_UP = {"outage": "held up by an outage", "retry": "waiting for a retry"}


@dataclass(slots=True)
class InDatabase:
    """What Postgres knows."""

    standings: list[Standing] = field(default_factory=list)
    troubles: list[Noted] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    rows: list[Rows] = field(default_factory=list)
    estimate: Estimate | None = None
    watermarks: dict[Partition, Watermark] = field(default_factory=dict)
    round: Latest | None = None
    replays: list[UnderWay] = field(default_factory=list)


@dataclass(slots=True)
class InKafka:
    """What the brokers know. A partition about which they have no answer is in `unknown`, with the reason."""

    topic_ids: dict[str, str] = field(default_factory=dict)
    partitions: list[Partition] = field(default_factory=list)
    committed: dict[Partition, CommittedOffset | None] = field(default_factory=dict)
    ends: dict[Partition, End] = field(default_factory=dict)
    heads: dict[Partition, Head | None] = field(default_factory=dict)
    unknown: dict[Partition, str] = field(default_factory=dict)
    members: int | None = None  # of the group


@dataclass(slots=True)
class PartitionStatus:
    """One partition of an input topic. What is not known is None."""

    topic: str
    partition: int
    state: str
    why: list[str] = field(default_factory=list)
    since: datetime | None = None  # of its trouble
    owner: str | None = None
    slot: int | None = None
    epoch: int | None = None
    position: int | None = None  # everything below is applied
    committed: int | None = None  # everything below is published
    end: int | None = None  # the last stable offset
    lag: int | None = None  # offsets between position and end; 0 if nothing but markers is left
    lag_seconds: float | None = None  # age of the oldest record that is not done, by its own timestamp
    failed: int | None = None
    parked: int | None = None
    unsent: int | None = None  # batches that wait for Kafka
    last_progress: datetime | None = None

    @property
    def name(self) -> str:
        return str(Partition(self.topic, self.partition))


def start_of(standing: Standing | None, committed: CommittedOffset | None, end: End | None, start: str) -> int | None:
    """Return the offset where work on a partition goes on, or would begin; None if nobody can know yet."""
    if standing is not None:
        moved = committed is not None and not committed.ours
        return committed.offset if committed is not None and moved else standing.position
    if committed is not None:
        return committed.offset
    return None if end is None or start == "fail" else end.start if start == "earliest" else end.stable


def judged(database: InDatabase | None, kafka: InKafka | None, start: str, now: datetime) -> list[PartitionStatus]:
    """Every partition that one of the two knows, in order."""
    known = database or InDatabase()
    seen = kafka or InKafka()
    standings = {Partition(one.topic, one.partition): one for one in known.standings}
    troubles = {Partition(one.topic, one.partition): one for one in known.troubles}
    rows = _rows_by_partition(known.standings, known.rows)
    found = []
    for at in sorted({*standings, *seen.partitions}):
        standing = standings.get(at)
        one = PartitionStatus(at.topic, at.number, UNKNOWN)
        if database is not None:
            _judge_owner(one, standing, troubles.get(at))
            one.failed, one.parked = (rows.get((at, status), 0) for status in ("failed", "parked"))
        if standing is not None:
            one.owner, one.slot, one.epoch = standing.owner, standing.slot, standing.epoch
            one.position, one.last_progress = standing.position, standing.updated_at
            committed = seen.committed.get(at)
            below = committed.offset if committed is not None and committed.ours else -1
            one.unsent = sum(end > below for end in standing.unsent)
        if kafka is not None:
            _judge_lag(one, standing, at, kafka, start, now)
        found.append(one)
    return found


def by_status(rows: Iterable[Rows]) -> list[tuple[str, int, datetime | None]]:
    """Status, number and the oldest, of all partitions together."""
    found: dict[str, tuple[int, datetime]] = {}
    for row in rows:
        count, oldest = found.get(row.status, (0, row.oldest))
        found[row.status] = count + row.rows, min(oldest, row.oldest)
    return [(status, count, oldest) for status, (count, oldest) in sorted(found.items())]


def _judge_owner(one: PartitionStatus, standing: Standing | None, trouble: Noted | None) -> None:
    """Who works on it, and what its owner has written down, if that is still true."""
    if trouble is not None and trouble.epoch != (standing.epoch if standing else 0):
        trouble = None  # of an owner before the present one
    if trouble is not None and trouble.alive:
        one.state, one.since = trouble.kind, trouble.since
        one.why.append(trouble.reason)
    elif standing is None:
        one.state = UNOWNED
        one.why.append("no process has begun with it yet")
    elif not standing.alive:
        one.state = NO_OWNER
        text = f"{standing.owner}, its last owner, has ended"
        if trouble is not None:
            text += f" with the partition {_HELD_UP.get(trouble.kind, trouble.kind)}: {trouble.reason}"
        one.why.append(text)
    else:
        one.state = RUNNING


def _judge_lag(
    one: PartitionStatus, standing: Standing | None, at: Partition, kafka: InKafka, start: str, now: datetime
) -> None:
    committed, end = kafka.committed.get(at), kafka.ends.get(at)
    one.committed = committed.offset if committed else None
    if at in kafka.unknown:
        one.why.append(kafka.unknown[at])
    if at not in kafka.partitions:
        one.why.append("it does not exist in Kafka (any more)")
        return
    if standing is not None and kafka.topic_ids.get(at.topic) != standing.topic_id:
        one.why.append("the topic was deleted and created anew: see `processor topic-recreated --dry-run`")
        return
    position = start_of(standing, committed, end, start)
    if standing is not None and position != standing.position:
        one.why.append(f"its offset was set to {position}: the next owner begins there")
    if position is None or end is None:
        return
    one.end = end.stable
    one.lag = max(0, end.stable - position)
    if position < end.start:
        one.why.append(f"what lies between {position} and {end.start}, where the log begins, has expired")
    if not one.lag:
        one.lag_seconds = 0.0
    elif at in kafka.heads:
        head = kafka.heads[at]
        if head is None:
            one.lag, one.lag_seconds = 0, 0.0
        elif head.timestamp_ms is not None:
            one.lag_seconds = max(0.0, (now - datetime.fromtimestamp(head.timestamp_ms / 1000, UTC)).total_seconds())


def _rows_by_partition(standings: Iterable[Standing], rows: Iterable[Rows]) -> Mapping[tuple[Partition, str], int]:
    """The number of rows by partition and status, those of earlier topics of the same name included."""
    places = {id_: Partition(one.topic, one.partition) for one in standings for id_ in (one.partition_id, *one.former)}
    found: dict[tuple[Partition, str], int] = {}
    for row in rows:
        place = places[row.partition_id], row.status
        found[place] = found.get(place, 0) + row.rows
    return found
