"""`processor replay show`."""

from __future__ import annotations

import asyncio

import typer

from processor.cli.arguments import ConfigFile, grouped
from processor.cli.deployment import load
from processor.cli.output import Format, Output, print_json, print_line, print_table, safe
from processor.cli.replay.foreground import as_json
from processor.cli.replay.options import Name
from processor.operations.replay.run import load as load_replay
from processor.postgres import connections
from processor.postgres.replays import Replay
from processor.settings.schema import Settings

TITLES = ("partition", "from", "at", "to", "processed", "skipped", "failed", "outputs")


@grouped
def show(config_file: ConfigFile, name: Name, *, output: Output) -> None:
    """Show one replay: what was asked for, how far it is in each partition, who did what to it, when and why.

    \b
    processor replay show shop.toml rebuild
    processor replay show shop.toml rebuild -o json
    """

    async def act(settings: Settings) -> Replay:
        async with connections.with_tables(settings) as db:
            return await load_replay(db, settings.consumer, name)

    replay = asyncio.run(act(load(config_file)))
    if output.format is not Format.TABLE:
        (print_json if output.format is Format.JSON else print_line)(as_json(replay))
        return
    typer.echo(f"{replay.name}: {replay.plan['mode']}, {replay.state}")
    for one in replay.history:
        why = f": {safe(str(one['reason']))}" if "reason" in one else ""
        typer.echo(f"{one['at']} {one['event']} by {safe(str(one['by']))}{why}")
    rows = [
        (
            str(one.partition),
            *map(str, (one.first, one.position, one.end, one.processed, one.skipped, one.failed, one.outputs)),
        )
        for one in replay.ranges
    ]
    print_table(TITLES, rows, {})
