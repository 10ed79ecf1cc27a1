"""Finds out what a replay would go over, and refuses what cannot be gone over safely.

A range ends at the last stable offset of now, at the latest. One of `missing` ends at the live service's position: what
comes later is its own work.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from processor.errors import BatchAborted, Halt
from processor.messages.message import Partition
from processor.operations.replay.plan import Mode, Plan, Refused
from processor.postgres import replays, retention
from processor.postgres.replays import Live, Range

if TYPE_CHECKING:
    from processor.kafka.cluster import Cluster
    from processor.messages.positions import CommittedOffset, Log
    from processor.postgres.retention import Watermark
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Bounds:
    """What was asked for; what is None is not bounded."""

    partitions: Mapping[Partition, tuple[int | None, int | None]] | None = None  # these alone, with their own bounds
    first: int | None = None
    end: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    clip: bool = False  # to what Kafka has


@dataclass(frozen=True, slots=True)
class Facts:
    """What brokers and database say at one time."""

    logs: Mapping[Partition, Log]
    stable: Mapping[Partition, int]
    committed: Mapping[Partition, CommittedOffset | None]
    live: Mapping[Partition, Live]
    watermarks: Mapping[Partition, Watermark]


async def find(connection: Connection, settings: Settings, cluster: Cluster, plan: Plan, bounds: Bounds) -> Plan:
    """Return the plan with its ranges and warnings; raise Refused or Halt if it cannot be run."""
    await _require_output_topic(cluster, plan)
    partitions = await chosen(settings, cluster, bounds.partitions)
    facts = await gather(connection, settings.consumer, cluster, partitions)
    since = await _moment(cluster, partitions, bounds.since, facts.stable)
    until = await _moment(cluster, partitions, bounds.until, facts.stable)
    ranges, notes = [], []
    for partition in partitions:
        if partition not in facts.live:
            if bounds.partitions is not None:
                raise Refused(
                    f"{partition}: {settings.consumer} has never had it: nothing to replay; start the service"
                )
            notes.append(f"{partition}: left out: {settings.consumer} has never had it")
            continue
        first, end = (bounds.partitions or {}).get(partition, (bounds.first, bounds.end))
        log, stable = facts.logs[partition], facts.stable[partition]
        if first is None:
            first = min(since.get(partition, log.start), stable)
        if end is None:
            end = min(until.get(partition, stable), stable)
        if bounds.clip:
            first, end = min(max(first, log.start), stable), min(max(end, log.start), stable)
        if first != end:
            ranges.append(_range(partition, facts, first, end))
    return check(settings, replace(plan, ranges=tuple(ranges)), facts, notes)


async def recheck(connection: Connection, settings: Settings, cluster: Cluster, plan: Plan) -> Plan:
    """Check a plan again that was made earlier."""
    if plan.consumer != settings.consumer:
        raise Refused(f"the plan is for the consumer {plan.consumer}, {settings.source} is for {settings.consumer}")
    await _require_output_topic(cluster, plan)
    partitions = [one.partition for one in plan.ranges]
    if strangers := {one.topic for one in partitions}.difference(settings.topics):
        raise Refused(f"{settings.consumer} does not read {', '.join(sorted(strangers))}: make the plan again")
    facts = await gather(connection, settings.consumer, cluster, partitions)
    for one in plan.ranges:
        if one.partition not in facts.live or facts.live[one.partition].ledger_id != one.live_id:
            raise Refused(f"{one.partition}: is not what it was when the plan was made: make the plan again")
    ranges = tuple(_range(one.partition, facts, one.first, one.end) for one in plan.ranges)
    return check(settings, replace(plan, ranges=ranges), facts)


async def gather(connection: Connection, consumer: str, cluster: Cluster, partitions: Sequence[Partition]) -> Facts:
    """Ask for Kafka's positions first: the live service moves its own in Postgres before them."""
    committed = await _known(cluster.committed, partitions)
    live = await replays.live(connection, consumer)
    logs = await _known(cluster.logs, partitions)
    stable = await _known(cluster.last_stable, partitions)
    return Facts(logs, stable, committed, live, await retention.watermarks(connection, consumer))


async def logs(cluster: Cluster, partitions: Sequence[Partition]) -> dict[Partition, Log]:
    return await _known(cluster.logs, partitions)


async def ends(cluster: Cluster, partitions: Sequence[Partition]) -> dict[Partition, int]:
    return await _known(cluster.last_stable, partitions)


def check(settings: Settings, plan: Plan, facts: Facts, notes: Iterable[str] = ()) -> Plan:
    """Return the plan with what an operator should know; raise Refused or Halt if it cannot be run."""
    _require_sense(settings, plan)
    for one in plan.ranges:
        log, stable, live = facts.logs[one.partition], facts.stable[one.partition], facts.live[one.partition]
        if live.topic_id != log.topic_id:
            raise Halt(
                f"{one.partition}: the topic was deleted and created anew; see `processor topic-recreated "
                f"{settings.source}`"
            )
        if one.first > one.end:
            raise Refused(
                f"{one.partition}: begins at {one.first}, behind its end {one.end}; Kafka has the offsets "
                f"{log.start}-{stable}"
            )
        if one.first < log.start or one.end > stable:
            raise Refused(
                f"{one.partition}: Kafka has the offsets {log.start}-{stable}, not all of {one.first}-{one.end}: "
                f"ask for those, or give --clip"
            )
    warnings = list(notes)
    if plan.mode is Mode.MISSING:
        warnings += _about_ends(plan)
        plan = replace(plan, ranges=tuple(_left_to_do(plan.ranges)))
        warnings += _about_lost(settings, plan)
    for one in plan.ranges:
        warnings += _about_forgotten(plan, one, facts.watermarks.get(one.partition))
    warnings += _about_handlers(settings, plan)
    return replace(plan, warnings=tuple(warnings))


async def require_nothing_lost_since(
    connection: Connection, consumer: str, cluster: Cluster, ranges: Sequence[Range]
) -> None:
    """Raise Halt if the database has lost commits that a replay made earlier does not know of: it was restored."""
    facts = await gather(connection, consumer, cluster, [one.partition for one in ranges])
    for one in ranges:
        if one.partition in facts.live:
            now = _range(one.partition, facts, one.first, one.end)
            if now.silent and now.silent_below > one.silent_below:
                raise Halt(
                    f"{one.partition}: the database is behind Kafka's committed offset: it has lost the commits of "
                    f"{now.silent.start}-{now.silent.stop}, and this replay was made before that: cancel it, and make "
                    "another one"
                )


def _left_to_do(ranges: Sequence[Range]) -> list[Range]:
    """What of these is a matter of `missing`: the service has been there, and will not come there by itself.

    A database that has lost commits is first brought to where it was. A message that it has as failed may have been
    redriven after the dump: the outputs of that are known to be sent only while its second record is read.
    """
    behind = any(one.silent for one in ranges)
    firsts = [max(one.first, one.applied_below) if behind else one.first for one in ranges]
    cut = [
        replace(one, first=first, end=min(one.end, one.silent_below)) for first, one in zip(firsts, ranges, strict=True)
    ]
    return [one for one in cut if one.first < one.end]


async def _require_output_topic(cluster: Cluster, plan: Plan) -> None:
    missing: set[str] = set()
    if plan.output_topic is not None:
        missing = await asyncio.to_thread(cluster.missing, [plan.output_topic])
    if missing:
        raise Refused(f"--output-topic {plan.output_topic} does not exist; create it")


def _range(partition: Partition, facts: Facts, first: int, end: int) -> Range:
    log, live, committed = facts.logs[partition], facts.live[partition], facts.committed[partition]
    silent_below = live.position
    # Kafka's offset moves in one transaction with the outputs, so all below it are sent. If it is ahead of the
    # database, the database has lost commits, as one that was restored from a dump has.
    if committed is not None and committed.ours and (committed.epoch or 0) >= live.first_epoch:
        silent_below = max(silent_below, committed.offset)
    return Range(partition, log.topic_id, log.partitions, live.ledger_id, first, end, live.position, silent_below)


def _require_sense(settings: Settings, plan: Plan) -> None:
    if plan.mode is Mode.RE_APPLY and not plan.scope:
        raise Refused("--mode re-apply needs --scope NAME: the scope in which each message is done once")
    if plan.mode is not Mode.RE_APPLY and (plan.scope or plan.output_topic or not plan.outputs):
        raise Refused(f"--scope, --no-outputs and --output-topic are for --mode re-apply, not for {plan.mode}")
    if plan.output_topic and not plan.outputs:
        raise Refused("--no-outputs and --output-topic exclude each other")
    if plan.output_topic in settings.topics:
        raise Refused(f"--output-topic {plan.output_topic}: is read by {settings.consumer}: an endless loop")
    acting = sorted(type_ for type_, handler in settings.handlers.items() if handler.effect)
    chosen = [type_ for type_ in acting if not plan.wanted.types or type_ == "*" or type_ in plan.wanted.types]
    if plan.mode is not Mode.MISSING and chosen:
        raise Refused(
            f"handlers.{', '.join(chosen)} acts on other systems (effect = true): {plan.mode} would act again; choose "
            "others with --type"
        )


def _about_forgotten(plan: Plan, one: Range, watermark: Watermark | None) -> list[str]:
    if watermark is None or one.first >= watermark.below or plan.mode in (Mode.RE_APPLY, Mode.DRY_RUN):
        return []
    if not plan.despite_forgotten:
        raise Halt(
            f"{one.partition}: ids of messages below offset {watermark.below} have been forgotten (retention): what is "
            f"done would not be recognised. Safe: {max(one.first, watermark.below)}-{max(one.end, watermark.below)}. "
            "To do so all the same: --despite-forgotten"
        )
    return [f"{one.partition}: below {watermark.below} ids have been forgotten: what is done there is not recognised"]


def _about_ends(plan: Plan) -> list[str]:
    return [
        f"{one.partition}: ends at {one.silent_below}, where the service is: what comes later is its own work"
        for one in plan.ranges
        if one.end > one.silent_below
    ]


def _about_lost(settings: Settings, plan: Plan) -> list[str]:
    lost = [one for one in plan.ranges if one.silent]
    if lost and settings.failure.policy == "park-key":
        raise Refused(
            f"{lost[0].partition}: the database is behind Kafka's committed offset, and failure.policy = 'park-key': a "
            "replay would not keep the order of keys that were parked since; start the service with "
            "kafka.on_database_behind = 'reapply' instead"
        )
    return [
        f"{one.partition}: the database is behind Kafka's committed offset: it has lost the commits of "
        f"{one.silent.start}-{one.silent.stop}. They are done again, their outputs are not sent a second time. "
        "Start the service afterwards, for once with kafka.on_database_behind = 'reapply'"
        for one in lost
    ]


def _about_handlers(settings: Settings, plan: Plan) -> list[str]:
    warnings = []
    bare = ", ".join(sorted(type_ for type_, handler in settings.handlers.items() if not handler.inbox))
    if bare and plan.mode is Mode.MISSING:
        warnings.append(f"handlers.{bare} has no inbox: passed over, since nothing says that one is missing")
    acting = ", ".join(sorted(type_ for type_, handler in settings.handlers.items() if handler.effect))
    if acting and plan.mode is Mode.MISSING and any(one.silent for one in plan.ranges):
        warnings.append(
            f"handlers.{acting} acts on other systems (effect = true): the calls that the database has lost are made "
            "again, with the same idempotency keys"
        )
    if plan.mode is Mode.MISSING and settings.failure.policy == "park-key":
        warnings.append("a message that fails in the replay does not park its key; what is parked is left to redrive")
    if plan.mode is Mode.RE_APPLY and plan.outputs and plan.output_topic is None:
        warnings.append("outputs go to their topics again, with the ids they had: see --no-outputs and --output-topic")
    if plan.mode is Mode.RE_EMIT:
        warnings.append("handlers run on the tables of today; what they write is rolled back")
    return warnings


async def chosen(settings: Settings, cluster: Cluster, wanted: Iterable[Partition] | None) -> list[Partition]:
    """All partitions of the topics, or these; raise Refused if one does not exist."""
    topics = await asyncio.to_thread(cluster.topics, settings.topics)
    every = [
        Partition(name, number)
        for name in settings.topics
        if name in topics
        for number in sorted(topics[name].partitions)
    ]
    if wanted is None:
        return every
    for partition in wanted:
        if partition not in every:
            raise Refused(f"{partition} does not exist, or {settings.consumer} does not read it")
    return list(wanted)


async def first_at(
    cluster: Cluster, partitions: Sequence[Partition], milliseconds: int, ends: Mapping[Partition, int]
) -> dict[Partition, int]:
    """The offsets of the first records of this time or later: the ends where there are none."""

    def ask(asked: Sequence[Partition]) -> tuple[dict[Partition, int], dict[Partition, str]]:
        return cluster.first_at(asked, milliseconds)

    found = await _known(ask, partitions)
    return {partition: ends[partition] if offset < 0 else offset for partition, offset in found.items()}


async def _moment(
    cluster: Cluster, partitions: Sequence[Partition], at: datetime | None, ends: Mapping[Partition, int]
) -> dict[Partition, int]:
    if at is None:
        return {}
    return await first_at(cluster, partitions, int(at.timestamp() * 1000), ends)


async def _known(
    ask: Callable[[Sequence[Partition]], tuple[dict[Partition, T], dict[Partition, str]]],
    partitions: Sequence[Partition],
) -> dict[Partition, T]:
    found, unknown = await asyncio.to_thread(ask, partitions)
    if unknown:
        raise BatchAborted("; ".join(unknown.values()))
    return found
