"""`processor topic-recreated`."""

from __future__ import annotations

import asyncio

import typer

from processor.cli.arguments import ConfigFile, DryRun, Yes, grouped, require_terminal, user
from processor.cli.deployment import load
from processor.cli.output import Format, Output, print_json, print_line
from processor.kafka.cluster import Cluster
from processor.operations import topic_recreated as operation
from processor.operations.topic_recreated import Recreated
from processor.postgres import connections


@grouped
def topic_recreated(config_file: ConfigFile, *, dry_run: DryRun = False, yes: Yes = False, output: Output) -> None:
    """Confirm that input topics were deleted and created anew, so that the service reads them from their beginning.

    The service halts when it finds such a topic, for its offsets mean other
    records now. Messages of the old topic that failed or are parked stay where
    they are, see `processor dlq`; messages of the new topic do not wait for
    them behind a parked key. Outputs that may not have been sent are sent.
    Completed messages stay completed: one that comes again under the same id
    is a duplicate.
    """
    settings = load(config_file)
    if not (dry_run or yes):
        require_terminal("begin anew")

    async def act() -> tuple[list[Recreated], int]:
        cluster = Cluster(settings.kafka, settings.consumer)
        try:
            async with connections.with_tables(settings) as db:
                found = await operation.find(db, settings.consumer, cluster.topics(settings.topics))
                for one in found:
                    _show(one, output.format)
                if dry_run or not found:
                    return found, 0
                if not yes:
                    typer.confirm("begin with the new one?", abort=True, err=True)
                return found, await operation.begin_anew(db, settings.consumer, found, cluster, user())
        finally:
            cluster.close()

    found, changed = asyncio.run(act())
    if output.format is Format.JSON:
        print_json({"dry_run": dry_run, "topics": found, "partitions_changed": changed})
    elif output.format is Format.TABLE and not found:
        typer.echo("nothing to do: every topic is the one that was read before")
    elif output.format is Format.TABLE and not dry_run:
        typer.echo(f"{changed} partition(s) begin anew; start the service again if it has stopped")


def _show(one: Recreated, form: Format) -> None:
    """As soon as it is found: the operator has to see it before being asked."""
    if form is Format.JSONL:
        print_line(one)
    elif form is Format.TABLE:
        _print(one)


def _print(one: Recreated) -> None:
    typer.echo(f"{one.name}: was {one.known_id}, is {one.id} now")
    typer.echo(f"  {len(one.partitions)} partition(s) would begin at the start of the new topic")
    if one.left:
        left = ", ".join(f"{count} {status}" for status, count in sorted(one.left.items()))
        typer.echo(f"  messages of the old one that are not done: {left}; `processor dlq` goes on showing them")
    if one.lost:
        typer.echo(f"  {one.lost} of them were being tried for the first time: only their ids are kept")
    if one.unsent:
        typer.echo(f"  outputs of {one.unsent} batch(es) are not known to be sent: the service sends them first")
