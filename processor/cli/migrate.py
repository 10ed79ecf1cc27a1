"""`processor migrate`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from processor.cli.arguments import ConfigFile, grouped
from processor.cli.deployment import load
from processor.cli.output import Format, Output, print_json, print_line
from processor.errors import ProcessorError
from processor.observe import logs
from processor.postgres import connections
from processor.postgres import migrate as migrations
from processor.settings.schema import Settings

log = logs.get_logger()


@grouped
def migrate(
    config_file: ConfigFile,
    *,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be applied; change nothing.")
    ] = False,
    output: Output,
) -> None:
    """Bring the database to the schema this release and its handlers need.

    Applies the numbered SQL files that are missing, each in one transaction,
    and records them. Many processes may run it at once, and at any time. A
    file that fails leaves nothing behind; those before it stay.
    """
    files: list[dict[str, Any]] = []

    def show(one: migrations.Migration | migrations.Applied) -> None:
        files.append({"set": one.set_name, "version": one.version, "name": one.name})
        if output.format is Format.TABLE:
            typer.echo(f"{'would apply' if dry_run else 'applied'} {one.label}")
        elif output.format is Format.JSONL:
            print_line(files[-1])

    def report(progress: migrations.Progress) -> None:
        match progress:
            case migrations.Waiting():
                log.info("migration_lock_wait")
            case migrations.Applied():
                log.debug("migration_applied", migration=progress.label, seconds=round(progress.seconds, 3))
                show(progress)

    async def act(settings: Settings) -> None:
        sets = migrations.sets(settings)
        async with connections.connected(settings) as connection:
            if dry_run:
                for pending in (await migrations.status(connection, sets)).pending:
                    show(pending)
            else:
                await migrations.apply(connection, sets, report)

    try:
        asyncio.run(act(load(config_file)))
    except ProcessorError:
        if output.format is Format.JSON and files:
            print_json({"dry_run": dry_run, "applied": files})
        raise
    if output.format is Format.JSON:
        print_json({"dry_run": dry_run, "pending" if dry_run else "applied": files})
    elif output.format is Format.TABLE and not files:
        typer.echo("nothing to apply: the database is as this code needs it")
