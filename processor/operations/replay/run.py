"""Runs a replay: writes it down, lets an engine work on it beside the live service, and says how it ended.

A replay that was killed, paused or interrupted goes on where it was: its positions are in the ledger, and the engine's
recovery sends what was stored and not sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from processor.engine.engine import Engine
from processor.errors import BatchAborted, ConnectionLost, Halt, ProcessorError, SetupError
from processor.operations.replay import ranges
from processor.operations.replay.job import ReplayJob
from processor.operations.replay.pace import Pace, Stand, falls_behind
from processor.operations.replay.plan import Mode, Plan, Refused, ledger_name
from processor.postgres import connections, replays, retention
from processor.postgres.replays import UNFINISHED, Replay
from processor.postgres.session import Session

if TYPE_CHECKING:
    from processor.handling.registry import Routes
    from processor.kafka.cluster import Cluster
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

# How often to look whether an operator has paused it, and how the live service does.
LOOK_SECONDS = 1.0
SHOW_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Moment:
    """How far it is, for whoever looks on."""

    done: int  # offsets
    total: int
    yields: bool


Watch = Callable[[Moment], None]


def event(what: str, by: str, reason: str | None = None) -> dict[str, Any]:
    at = datetime.now(UTC).isoformat(timespec="milliseconds")
    return {"at": at, "event": what, "by": by} | ({"reason": reason} if reason else {})


async def create(connection: Connection, settings: Settings, plan: Plan, by: str, reason: str | None) -> None:
    """Write a replay down; from now on nothing that it needs is forgotten."""
    if not plan.ranges:
        raise Refused("there is nothing to go over: the ranges are empty")
    async with connection.transaction(isolation="read_committed"):
        watermarks = await retention.watermarks(connection, settings.consumer, hold=True)
        for one in plan.ranges:
            watermark = watermarks.get(one.partition)
            safe = watermark is None or one.first >= watermark.below or plan.mode is Mode.RE_APPLY
            if not safe and not plan.despite_forgotten:
                raise Halt(f"{one.partition}: ids have been forgotten meanwhile: make the plan again")
        made = await replays.create(
            connection,
            settings.consumer,
            plan.name,
            ledger_name(settings.consumer, plan.name),
            plan.as_json() | {"ranges": []},  # those are rows of their own
            event("created", by, reason),
            plan.ranges,
        )
        if not made:
            raise Refused(
                f"a replay {plan.name} exists already: go on with it by `processor replay resume {settings.source} "
                f"{plan.name}`, or choose another --name"
            )


async def load(connection: Connection, consumer: str, name: str) -> Replay:
    found = await replays.find(connection, consumer, name)
    if not found:
        raise Refused(f"{consumer} has no replay {name}; `processor replay list` shows those that it has")
    return found[0]


def plan_of(replay: Replay) -> Plan:
    return replace(Plan.from_json(replay.plan), ranges=tuple(replay.ranges))


async def run(
    settings: Settings,
    routes: Routes,
    cluster: Cluster,
    name: str,
    by: str,
    stop: asyncio.Event,
    watch: Watch,
    *,
    rate: float | None = None,
) -> Replay:
    """Work on a replay until it is done, or until it is stopped; return how it stands then.

    A `rate` takes the place of the plan's, this time.
    """
    consumer = settings.consumer
    async with connections.with_tables(settings) as connection:
        replay = await load(connection, consumer, name)
        if replay.state not in UNFINISHED:
            raise Refused(f"the replay {name} is {replay.state}: make another one")
        await _require_readable(cluster, replay)
        plan = plan_of(replay)
        if plan.mode is Mode.MISSING:
            await ranges.require_nothing_lost_since(connection, consumer, cluster, plan.ranges)
        watermarks = await retention.watermarks(connection, consumer)
    pace = Pace(rate or plan.rate)
    job = ReplayJob(settings, plan, pace, {at: one.below for at, one in watermarks.items()})
    engine = Engine(job.settings, routes, job)
    session = Session(settings, "replay", retried=True)
    try:
        await engine.parts.slot.lease()  # refused if another process runs it
        async with session.use() as connection:
            if not await replays.move(connection, consumer, name, UNFINISHED, "active", event("started", by)):
                raise Refused(f"the replay {name} has just been ended")
    except ProcessorError:
        await session.close()
        await engine.parts.close()
        raise
    beside = [
        asyncio.create_task(_watch_state(session, consumer, name, engine)),
        asyncio.create_task(_watch_live(session, cluster, settings, plan, pace)),
        asyncio.create_task(_show(engine, plan, pace, watch)),
        asyncio.create_task(_stop(stop, engine)),
    ]
    try:
        await engine.run()
    finally:
        for task in beside:
            task.cancel()
        await asyncio.wait(beside)
        await session.close()
    halted = [f"{one.partition}: {one.halted}" for one in engine.parts.partitions.owned() if one.halted]
    return await _conclude(settings, name, by, halted, stopped=stop.is_set())


async def _conclude(settings: Settings, name: str, by: str, halted: list[str], *, stopped: bool) -> Replay:
    async with connections.with_tables(settings) as connection:
        replay = await load(connection, settings.consumer, name)
        if all(one.done for one in replay.ranges):
            await replays.move(connection, settings.consumer, name, UNFINISHED, "finished", event("finished", by))
        elif halted:
            raise Halt("; ".join(halted))
        elif replay.state == "active" and not stopped:
            raise SetupError(f"the replay {name} could not send its last outputs: resume it")
        return await load(connection, settings.consumer, name)


async def _require_readable(cluster: Cluster, replay: Replay) -> None:
    """A replay that stood still for long may have been overtaken by the retention of its topic."""
    left = {one.partition: one for one in replay.ranges if one.position < one.end}
    for partition, log in (await ranges.logs(cluster, list(left))).items():
        if left[partition].topic_id != log.topic_id:
            raise Halt(f"{partition}: the topic was deleted and created anew: cancel this replay")
        if left[partition].position < log.start:
            raise Halt(
                f"{partition}: the replay is at offset {left[partition].position}, the log now begins at {log.start}: "
                "records expired before they were read; cancel it, and plan another one with --clip"
            )


async def _watch_state(session: Session, consumer: str, name: str, engine: Engine) -> None:
    """Stop when an operator has paused or cancelled it."""
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            async with session.use() as connection:
                if await replays.state(connection, consumer, name) != "active":
                    engine.stop()
                    return
        except (BatchAborted, ConnectionLost):
            continue  # the engine has noticed too


async def _watch_live(session: Session, cluster: Cluster, settings: Settings, plan: Plan, pace: Pace) -> None:
    """Stand still while the live service works and falls behind all the same."""
    partitions = [one.partition for one in plan.ranges]
    before: Stand | None = None
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        try:
            async with session.use() as connection:
                live = await replays.live(connection, settings.consumer)
            ends = await ranges.ends(cluster, partitions)
        except ProcessorError:
            continue
        known = [(end, live[partition].position) for partition, end in ends.items() if partition in live]
        now = Stand(sum(max(0, end - position) for end, position in known), sum(position for _, position in known))
        pace.hold(held=before is not None and falls_behind(before, now, settings.batch.max_messages))
        before = now


async def _show(engine: Engine, plan: Plan, pace: Pace, watch: Watch) -> None:
    ends = {one.partition: one for one in plan.ranges}
    while True:
        await asyncio.sleep(SHOW_SECONDS)
        known = [one for one in engine.parts.partitions.owned() if one.recovered]
        done = sum(min(one.position, ends[one.partition].end) - ends[one.partition].first for one in known)
        watch(Moment(done, plan.records, pace.yields))


async def _stop(stop: asyncio.Event, engine: Engine) -> None:
    await stop.wait()
    engine.stop()
