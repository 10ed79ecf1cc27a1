"""`processor replay start`."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import orjson
import typer

from processor.cli.arguments import ConfigFile, WrongUse, grouped, user
from processor.cli.deployment import load
from processor.cli.output import Format, Output, print_json, print_line, print_table
from processor.cli.replay.foreground import rehearse, work
from processor.cli.replay.options import PlanOptions, RangeOptions, Reason
from processor.kafka.cluster import Cluster
from processor.operations.replay import ranges
from processor.operations.replay.plan import Mode, Plan
from processor.operations.replay.run import create
from processor.postgres import connections
from processor.postgres.replays import Range
from processor.settings.schema import Settings

TITLES = ("partition", "from", "to", "offsets", "service at")


@grouped
def start(
    config_file: ConfigFile,
    range_: RangeOptions,
    options: PlanOptions,
    *,
    plan_file: Annotated[
        Path | None,
        typer.Option("--plan", metavar="FILE", help="Save the plan there; with --execute, run the plan that is there."),
    ] = None,
    execute: Annotated[
        bool, typer.Option("--execute", help="Do it. Without this, only say what would be done.")
    ] = False,
    reason: Reason = None,
    output: Output,
) -> None:
    """Go over records again, beside the service, which need not be stopped.

    Without --execute it says what it would do, and changes nothing. A replay
    may be killed at any time: `processor replay resume` goes on where it was.

    \b
    processor replay start shop.toml --since 2h
    processor replay start shop.toml --mode re-emit --partition 0:100-200 --execute
    """
    settings = load(config_file)
    saved = execute and plan_file is not None
    if saved and (range_ != RangeOptions() or options != PlanOptions()):
        raise WrongUse("--plan FILE --execute runs what is in the file: give no other options")
    plan = asyncio.run(_plan(settings, _read(plan_file) if saved and plan_file else None, range_, options))
    if not execute:
        if plan_file is not None:
            plan_file.write_bytes(orjson.dumps(plan.as_json(), option=orjson.OPT_INDENT_2))
        _print(plan, output.format, plan_file)
        return
    for warning in plan.warnings:
        typer.echo(f"note: {warning}", err=True)
    if plan.mode is Mode.DRY_RUN:
        rehearse(settings, plan, output.format)
    else:
        asyncio.run(_create(settings, plan, reason))
        work(settings, plan.name, output.format)


async def _plan(settings: Settings, saved: Plan | None, range_: RangeOptions, options: PlanOptions) -> Plan:
    bounds, plan = (None, saved) if saved else (range_.bounds(settings), options.plan(settings))
    cluster = Cluster(settings.kafka, settings.consumer)
    try:
        async with connections.with_tables(settings) as db:
            assert plan is not None
            if bounds is None:
                return await ranges.recheck(db, settings, cluster, plan)
            return await ranges.find(db, settings, cluster, plan, bounds)
    finally:
        cluster.close()


async def _create(settings: Settings, plan: Plan, reason: str | None) -> None:
    async with connections.with_tables(settings) as db:
        await create(db, settings, plan, user(), reason)


def _read(path: Path) -> Plan:
    try:
        document = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise WrongUse(f"--plan {path}: cannot be read: {error}") from None
    return Plan.from_json(document if isinstance(document, dict) else {})


def _print(plan: Plan, form: Format, file: Path | None) -> None:
    if form is not Format.TABLE:
        (print_json if form is Format.JSON else print_line)({"executed": False, **plan.as_json()})
        return
    typer.echo(f"{plan.name}: {_described(plan)}")
    print_table(TITLES, (_cells(one) for one in plan.ranges), {})
    typer.echo(f"{plan.records} offsets in {len(plan.ranges)} partition(s); nothing was changed")
    for warning in plan.warnings:
        typer.echo(f"note: {warning}", err=True)
    typer.echo(f"to do it: --execute{f' --plan {file}' if file else ''}", err=True)


def _cells(one: Range) -> tuple[str, ...]:
    return (str(one.partition), str(one.first), str(one.end), str(one.end - one.first), str(one.applied_below))


def _described(plan: Plan) -> str:
    what = {
        Mode.MISSING: "process what is not done",
        Mode.RE_EMIT: "send the outputs of what is done again",
        Mode.RE_APPLY: f"process all again in the scope {plan.scope}",
        Mode.DRY_RUN: "process all, change nothing, compare the outputs with those that were sent",
    }[plan.mode]
    outputs = "" if plan.outputs else ", send nothing"
    to = f", outputs to {plan.output_topic}" if plan.output_topic else ""
    only = ", only what --key, --type and --id choose" if plan.wanted else ""
    rate = f", at most {plan.rate:g} records per second" if plan.rate else ""
    return f"{what}{outputs}{to}{only}{rate}"
