"""`processor prune`."""

from __future__ import annotations

import asyncio
import os
from typing import Annotated, Any

import typer

from processor import failpoints
from processor.cli.arguments import ConfigFile, DryRun, grouped
from processor.cli.deployment import load
from processor.cli.output import Format, Output, counted, print_json, print_line
from processor.cli.progress import display
from processor.cli.signals import stopped_by_signals
from processor.kafka.cluster import Cluster
from processor.operations import prune as operation
from processor.retention.round import Done
from processor.settings.schema import Settings


@grouped
def prune(
    config_file: ConfigFile,
    *,
    dry_run: DryRun = False,
    pace: Annotated[
        int | None,
        typer.Option(min=1, max=100, help="Percent of its time in which it works, instead of retention.pace."),
    ] = None,
    output: Output,
) -> None:
    """Delete rows of completed messages whose retention is over, now.

    The service does this by itself, now and then; the command is for those
    who will not wait. It may run beside the service, and be interrupted at
    any time. What may still come again stays, as do failed and parked messages.

    Examples:

        processor prune shop.toml --dry-run

        processor prune shop.toml --pace 100
    """
    failpoints.arm(os.environ.get("PROCESSOR_FAILPOINTS", ""))
    settings = load(config_file)
    if pace is not None:
        retention = settings.retention.model_copy(update={"pace": pace})
        settings = settings.model_copy(update={"retention": retention})
    done = asyncio.run(_act(settings, dry_run=dry_run, quiet=output.format is not Format.TABLE))
    found = _as_json(done, dry_run=dry_run)
    match output.format:
        case Format.JSON:
            print_json(found)
        case Format.JSONL:
            print_line(found)
        case Format.TABLE:
            _print(done, dry_run=dry_run)
    if done is None or not done.complete:
        raise typer.Exit(130)


async def _act(settings: Settings, *, dry_run: bool, quiet: bool) -> Done | None:
    cluster = Cluster(settings.kafka, settings.consumer)
    try:
        with display("pages", quiet=quiet) as shown, stopped_by_signals() as stop:
            return await operation.run(
                settings,
                cluster,
                dry_run=dry_run,
                stop=stop,
                waiting=lambda: shown.waiting("waiting: the service, or another command, prunes just now"),
                moved=shown.done,
            )
    finally:
        cluster.close()


def _as_json(done: Done | None, *, dry_run: bool) -> dict[str, Any]:
    if done is None:
        return {"dry_run": dry_run, "complete": False, "deleted": 0}
    return {
        "dry_run": dry_run,
        "complete": done.complete,
        "would_delete" if dry_run else "deleted": done.deleted,
        "before": done.found.cutoff,
        "pages": done.pages,
        "seconds": round(done.seconds, 3),
        "archive": done.archived,
    }


def _print(done: Done | None, *, dry_run: bool) -> None:
    if done is None:
        typer.echo("interrupted before it began: nothing was deleted")
        return
    verb = "would delete" if dry_run else "deleted"
    if not done.complete:
        verb = f"interrupted: {verb}"
    before = f"{done.found.cutoff:%Y-%m-%d %H:%M:%S %Z}"
    kept = f", kept in {done.archived}" if done.archived else ""
    typer.echo(
        f"{verb} {counted(done.deleted, 'row')} last seen before {before}{kept}; "
        f"{counted(done.pages, 'page')} in {done.seconds:.1f} s"
    )
