"""`processor accept-rewind`."""

from __future__ import annotations

import asyncio

import typer

from processor.cli.arguments import ConfigFile, DryRun, Yes, grouped, require_terminal, user
from processor.cli.deployment import load
from processor.cli.output import Format, Output, counted, print_json, print_line
from processor.kafka.cluster import Cluster
from processor.operations import accept_rewind as operation
from processor.operations.accept_rewind import Rewind
from processor.postgres import connections


@grouped
def accept_rewind(config_file: ConfigFile, *, dry_run: DryRun = False, yes: Yes = False, output: Output) -> None:
    """Let the service read again what it has forgotten, and handle it as if it were new.

    The service halts where the group's offset was moved back to messages that
    retention has forgotten: handlers would run for them again, and their
    outputs would be sent again. This says that it is meant, for the offsets as
    they are now, and for one rewind.

    Examples:

        processor accept-rewind shop.toml --dry-run

        processor accept-rewind shop.toml --yes
    """
    settings = load(config_file)
    if not (dry_run or yes):
        require_terminal("accept it")

    async def act() -> list[Rewind]:
        cluster = Cluster(settings.kafka, settings.consumer)
        try:
            async with connections.with_tables(settings) as db:
                found = await operation.find(db, settings.consumer, settings.topics, cluster)
                for one in found:
                    _show(one, output.format)
                if found and not dry_run:
                    if not yes:
                        typer.confirm("handle these again?", abort=True, err=True)
                    await operation.accept(db, settings.consumer, found, user())
                return found
        finally:
            cluster.close()

    found = asyncio.run(act())
    if output.format is Format.JSON:
        print_json({"dry_run": dry_run, "rewinds": [_described(one) for one in found]})
    elif output.format is Format.TABLE and not found:
        typer.echo("nothing to accept: no committed offset lies below what is remembered")
    elif output.format is Format.TABLE and not dry_run:
        typer.echo(f"accepted for {counted(len(found), 'partition')}; start the service again if it has stopped")


def _described(one: Rewind) -> dict[str, object]:
    return {
        "topic": one.topic,
        "partition": one.partition,
        "offset": one.offset,
        "again_below": one.again_below,
        "remembered_from": one.remembered_from,
    }


def _show(one: Rewind, form: Format) -> None:
    """As soon as it is found: the operator has to see it before being asked."""
    if form is Format.JSONL:
        print_line(_described(one))
    elif form is Format.TABLE:
        typer.echo(
            f"{one.topic}[{one.partition}]: messages from {one.offset} to {one.again_below - 1} would be handled "
            f"again; from {one.remembered_from} on they are remembered"
        )
