"""Works on a replay in this process, shows how far it is, and says in the end what came of it."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import typer
import uvloop

from processor import failpoints
from processor.cli.arguments import user
from processor.cli.output import Format, counted, print_json, print_line
from processor.cli.progress import Display, display
from processor.cli.replay.report import show
from processor.cli.signals import stopped_by_signals
from processor.handling import registry
from processor.handling.registry import Routes
from processor.kafka.cluster import Cluster
from processor.operations.replay import rehearsal as operation
from processor.operations.replay.plan import Plan
from processor.operations.replay.rehearsal import Report
from processor.operations.replay.run import Moment, Watch, run
from processor.postgres.replays import UNFINISHED, Replay
from processor.service import interpreter
from processor.settings.schema import Settings

T = TypeVar("T")


def work(settings: Settings, name: str, form: Format, rate: float | None = None) -> None:
    """Run the replay to its end, or until it is paused, cancelled or interrupted."""
    failpoints.arm(os.environ.get("PROCESSOR_FAILPOINTS", ""))
    replay, interrupted = _run(settings, form, partial(_work, name=name, rate=rate))
    if form is Format.TABLE:
        typer.echo(_said(settings, replay, interrupted=interrupted))
    else:
        (print_json if form is Format.JSON else print_line)(as_json(replay) | {"interrupted": interrupted})
    if interrupted:
        raise typer.Exit(130)
    if any(one.failed for one in replay.ranges):
        raise typer.Exit(1)


def rehearse(settings: Settings, plan: Plan, form: Format) -> None:
    """Run the plan dry, and show what came out."""
    report = _run(settings, form, partial(_rehearse, plan=plan))
    show(report, form)
    if report.interrupted:
        raise typer.Exit(130)
    if report.failed:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class _Surroundings:
    """What a replay is given besides what it is to do."""

    settings: Settings
    routes: Routes
    cluster: Cluster
    stop: asyncio.Event
    watch: Watch


def _run(settings: Settings, form: Format, work: Callable[[_Surroundings], Awaitable[T]]) -> T:
    """Run it in an event loop of its own, with signals heard and progress shown."""
    if "PROCESSOR_LOG_LEVEL" not in os.environ:
        logging.getLogger().setLevel(logging.WARNING)  # what the engine says otherwise would tear the bar
    routes = registry.load(settings)
    interpreter.tune()

    async def act() -> T:
        cluster = Cluster(settings.kafka, settings.consumer)
        with display("gone over", quiet=form is not Format.TABLE, paced=True) as shown, stopped_by_signals() as stop:
            try:
                return await work(_Surroundings(settings, routes, cluster, stop, _Watcher(shown)))
            finally:
                cluster.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(act())


async def _work(given: _Surroundings, name: str, rate: float | None) -> tuple[Replay, bool]:
    replay = await run(given.settings, given.routes, given.cluster, name, user(), given.stop, given.watch, rate=rate)
    return replay, given.stop.is_set() and replay.state in UNFINISHED


async def _rehearse(given: _Surroundings, plan: Plan) -> Report:
    return await operation.rehearse(given.settings, given.routes, given.cluster, plan, given.stop, given.watch)


class _Watcher:
    """Shows how a replay proceeds."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._yields = False

    def __call__(self, moment: Moment) -> None:
        self._display.done(moment.done, moment.total)
        if moment.yields is not self._yields:
            self._yields = moment.yields
            self._display.waiting("waiting: the service falls behind" if moment.yields else "")


def _said(settings: Settings, replay: Replay, *, interrupted: bool) -> str:
    total = sums(replay)
    text = (
        f"{replay.name}: {'interrupted' if interrupted else replay.state}: {total['processed']} processed, "
        f"{total['skipped']} skipped, {total['failed']} failed, {counted(total['outputs'], 'output')}"
    )
    if replay.state in UNFINISHED:
        text += f"; go on with it: processor replay resume {settings.source} {replay.name}"
    return text


def sums(replay: Replay) -> dict[str, int]:
    """What a replay has come to in all partitions."""
    names = ("processed", "skipped", "failed", "outputs")
    return {name: sum(getattr(one, name) for one in replay.ranges) for name in names}


def as_json(replay: Replay) -> dict[str, Any]:
    return {
        "name": replay.name,
        "state": replay.state,
        **sums(replay),
        "offsets": sum(one.end - one.first for one in replay.ranges),
        "offsets_done": sum(min(one.position, one.end) - one.first for one in replay.ranges),
        "plan": {name: value for name, value in replay.plan.items() if name != "ranges"},
        "history": list(replay.history),
        "ranges": [
            {
                "topic": one.partition.topic,
                "partition": one.partition.number,
                "first": one.first,
                "position": one.position,
                "end": one.end,
                "processed": one.processed,
                "skipped": one.skipped,
                "failed": one.failed,
                "outputs": one.outputs,
            }
            for one in replay.ranges
        ],
    }
