"""`processor status`."""

from __future__ import annotations

import asyncio
import time
from contextlib import AbstractContextManager, nullcontext
from datetime import datetime
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from processor.cli.arguments import ConfigFile, WrongUse, grouped
from processor.cli.deployment import load
from processor.cli.output import Format, Output, age, as_table, counted, print_json, print_line, safe
from processor.errors import Halt, SetupError
from processor.operations.judging import PartitionStatus
from processor.operations.status import Forgetting, Observer, Report, Target
from processor.postgres.pruning import Latest
from processor.settings.schema import Settings

TITLES = (
    *("partition", "state", "lag", "age", "position", "end", "committed", "failed", "parked", "to send"),
    *("progress", "epoch", "owner"),
)
# What a narrow terminal has no room for.
WIDE_COLUMNS, LESS_TELLING = 130, ("position", "end", "committed", "epoch", "owner")
COLOURS = {"running": "green", "halted": "bold red", "recovering": "yellow", "outage": "yellow", "retry": "yellow"}
COLOURS |= {"no owner": "red", "unowned": "red", "unknown": "red"}
# So many are named in a line.
WATERMARKS = 8
# How often to look while waiting: the cheapest of two evils, as each look asks both servers.
WAIT_SECONDS = 0.5


@grouped
def status(
    config_file: ConfigFile,
    *,
    watch: Annotated[
        bool, typer.Option("--watch", help="Look again and again, until Ctrl-C; on a terminal the picture is redrawn.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks of --watch.")] = 2.0,
    wait: Annotated[
        str | None,
        typer.Option(
            metavar="ready|drained|lag<N",
            help="Wait until every partition is being worked on, until everything is done, or until the lag of all"
            " partitions together is below N.",
        ),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(min=0, help="Give up --wait after this many seconds; without it, never.")
    ] = None,
    output: Output,
) -> None:
    """Show where a consumer stands: owner, position, lag and trouble of each partition; its inbox; who is at work.

    Asks Postgres and Kafka, and works from any machine, whether a processor
    runs or not. It changes nothing: a role that may read our tables is enough.
    If one of the servers is down, it says so and shows what the other knows.

    Lag is counted in offsets up to the last stable offset; age is that of the
    oldest record that is not done, by its own timestamp.

    \b
    processor status shop.toml --watch
    processor status shop.toml --wait drained --timeout 60 && echo done
    """
    settings = load(config_file)
    target = Target.parse(wait) if wait is not None else None
    if wait is not None and target is None:
        raise WrongUse(f"--wait {wait}: valid are ready, drained and lag<N, such as 'lag<1000' (quote the <)")
    if timeout is not None and target is None:
        raise WrongUse("--timeout is for --wait: how long to wait for what?")
    if watch and target is not None:
        raise WrongUse("--watch shows, --wait waits: give one of them")
    if watch:
        asyncio.run(_watch(settings, interval, output.format))
    elif target is not None:
        asyncio.run(_wait(settings, target, timeout, output.format))
    else:
        report = asyncio.run(_look(settings))
        _print(report, output.format)
        if down := [why for why in (report.postgres, report.kafka) if why]:
            raise SetupError("\n".join(down))


async def _look(settings: Settings) -> Report:
    observer = Observer(settings)
    try:
        return await observer.look()
    finally:
        observer.close()


async def _watch(settings: Settings, interval: float, form: Format) -> None:
    observer, console = Observer(settings), Console()
    redrawn = form is Format.TABLE and console.is_terminal
    live = Live(console=console, auto_refresh=False, vertical_overflow="visible") if redrawn else None
    drawing: AbstractContextManager[object] = live or nullcontext()
    try:
        with drawing:
            while True:
                report = await observer.look()
                if live is not None:
                    live.update(_drawn(report, console.width), refresh=True)
                else:
                    _print(report, form)
                    if form is Format.TABLE:
                        typer.echo()
                await asyncio.sleep(interval)
    finally:
        observer.close()


async def _wait(settings: Settings, target: Target, seconds: float | None, form: Format) -> None:
    """Raises SetupError (exit 1) when the time is over, and Halt (exit 3) when only an operator can help."""
    deadline = None if seconds is None else time.monotonic() + seconds
    observer = Observer(settings)
    try:
        while True:
            report = await observer.look()
            missing = target.missing(report)
            if not missing:
                _print(report, form)
                return
            if hopeless := target.hopeless(report):
                _print(report, form)
                raise Halt("; ".join(f"{one.name} is halted: {safe(' '.join(one.why))}" for one in hopeless))
            if deadline is not None and time.monotonic() >= deadline:
                _print(report, form)
                raise SetupError(f"not {target.text} within {seconds:g} s: {'; '.join(missing)}")
            await asyncio.sleep(WAIT_SECONDS if deadline is None else min(WAIT_SECONDS, deadline - time.monotonic()))
    finally:
        observer.close()


def _print(report: Report, form: Format) -> None:
    match form:
        case Format.JSON:
            print_json(as_json(report))
        case Format.JSONL:
            print_line(as_json(report))
        case Format.TABLE if (console := Console()).is_terminal:
            console.print(_drawn(report, console.width))
        case Format.TABLE:
            rows = (TITLES, *(_cells(one, report.at) for one in report.partitions))
            lines = [_head(report), *("\t".join(row) for row in rows), *_troubles(report), *_foot(report)]
            typer.echo("\n".join(lines))


def as_json(report: Report) -> dict[str, Any]:
    completed = report.completed
    return {
        "consumer": report.consumer,
        "at": report.at,
        "lag": report.lag,
        "partitions": report.partitions,
        "inbox": {one.status: {"rows": one.rows, "oldest": one.oldest} for one in report.inbox},
        "inbox_estimate": completed and completed._asdict(),
        "retention": _retention_as_json(report.forgetting),
        "replays": report.replays,
        "slots": report.slots,
        "members": report.members,
        "unreachable": {name: why for name, why in (("postgres", report.postgres), ("kafka", report.kafka)) if why},
    }


def _retention_as_json(forgetting: Forgetting | None) -> dict[str, Any] | None:
    if forgetting is None:
        return None
    return {
        "span_seconds": forgetting.span and forgetting.span.total_seconds(),
        "round": forgetting.round,
        "watermarks": [
            {"topic": at.topic, "partition": at.number, "below": one.below, "accepted": one.accepted}
            for at, one in sorted(forgetting.watermarks.items())
        ],
    }


def _drawn(report: Report, width: int) -> Group:
    shown = [index for index, title in enumerate(TITLES) if width >= WIDE_COLUMNS or title not in LESS_TELLING]
    rows = [_cells(one, report.at) for one in report.partitions]
    table = as_table([TITLES[index] for index in shown], ([row[index] for index in shown] for row in rows), COLOURS)
    lines = [*(Text(line, "yellow") for line in _troubles(report)), *map(Text, _foot(report))]
    return Group(Text(_head(report), "bold"), table, *lines)


def _head(report: Report) -> str:
    lag = "lag unknown" if report.lag is None else f"lag {report.lag}"
    at = report.at.isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z")
    parts = [report.consumer, at, lag]
    if report.postgres is None:
        slots = f" (slots {', '.join(map(str, report.slots))})" if report.slots else ""
        parts.append(f"{len(report.slots)} {'process' if len(report.slots) == 1 else 'processes'}{slots}")
    if report.members is not None:
        parts.append(f"{counted(report.members, 'member')} in the group")
    return "  ".join(parts)


def _cells(one: PartitionStatus, now: datetime) -> tuple[str, ...]:
    progress = None if one.last_progress is None else max(0.0, (now - one.last_progress).total_seconds())
    return (
        one.name,
        one.state,
        _number(one.lag),
        age(one.lag_seconds),
        *map(_number, (one.position, one.end, one.committed, one.failed, one.parked, one.unsent)),
        "-" if progress is None else f"{age(progress)} ago",
        _number(one.epoch),
        one.owner or "-",
    )


def _troubles(report: Report) -> list[str]:
    """Why something stands still, in words: servers that are down first."""
    found = [f"Postgres is unreachable: {safe(report.postgres)}"] if report.postgres else []
    found += [f"Kafka is unreachable: {safe(report.kafka)}"] if report.kafka else []
    for one in report.partitions:
        if one.why:
            since = "" if one.since is None else f" for {age((report.at - one.since).total_seconds())}"
            found.append(f"{one.name} {one.state}{since}: {safe('; '.join(' '.join(why.split()) for why in one.why))}")
        elif one.parked:
            wait = "message waits" if one.parked == 1 else "messages wait"
            found.append(f"{one.name}: {one.parked} {wait} behind one that failed: `processor dlq list`")
    return found


def _foot(report: Report) -> list[str]:
    if report.postgres is not None:
        return []
    parts = [
        f"{one.rows} {one.status}"
        + ("" if one.oldest is None else f" (oldest {age((report.at - one.oldest).total_seconds())})")
        for one in report.inbox
    ]
    inbox = f"inbox: {', '.join(parts) or 'nothing failed, parked or pending'}"
    return [inbox, *_estimated(report), *_forgotten(report), *_replays(report)]


def _estimated(report: Report) -> list[str]:
    estimate = report.completed
    if estimate is None:
        return []
    if estimate.rows < 0:
        return ["completed: not counted, as Postgres has no statistics of the inbox yet (ANALYZE inbox)"]
    shared = "" if estimate.consumers == 1 else f" of all {estimate.consumers} consumers"
    oldest = (
        "" if estimate.oldest is None else f", the oldest about {age((report.at - estimate.oldest).total_seconds())}"
    )
    return [f"completed: about {estimate.rows} rows{shared}{oldest} (by Postgres' statistics, not counted)"]


def _forgotten(report: Report) -> list[str]:
    """Retention: what it is set to, its round, and below which offsets ids may be forgotten."""
    forgetting = report.forgetting
    if forgetting is None:
        return []
    parts = ["off" if forgetting.span is None else age(forgetting.span.total_seconds())]
    if forgetting.round is not None:
        parts.append(_round(forgetting.round, report.at))
    elif forgetting.span is not None:
        parts.append("no round yet")
    lines = [f"retention: {', '.join(parts)}"]
    below = [f"{at} {one.below}" for at, one in sorted(forgetting.watermarks.items()) if one.below]
    if below:
        more = f" and {len(below) - WATERMARKS} more (-o json has all)" if len(below) > WATERMARKS else ""
        lines.append(f"forgotten below: {', '.join(below[:WATERMARKS])}{more}")
    return lines


def _round(one: Latest, now: datetime) -> str:
    if one.finished_at is None:
        began = age((now - one.began_at).total_seconds())
        return f"a round began {began} ago and is at page {min(one.page, one.pages)} of {one.pages}"
    rows = "" if one.deleted is None else f", {counted(one.deleted, 'row')} deleted"
    return f"last round ended {age((now - one.finished_at).total_seconds())} ago{rows}"


def _replays(report: Report) -> list[str]:
    return [
        f"replay {one.name}: {one.mode}, {one.state}, {one.offsets_done} of {counted(one.offsets, 'offset')}"
        for one in report.replays
    ]


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)
