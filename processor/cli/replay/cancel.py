"""`processor replay cancel`."""

from __future__ import annotations

import asyncio

import typer

from processor.cli.arguments import ConfigFile, grouped, user
from processor.cli.deployment import load
from processor.cli.output import Format, Output, print_json, print_line
from processor.cli.replay.foreground import as_json
from processor.cli.replay.options import Name, Reason
from processor.operations.replay import control
from processor.postgres import connections
from processor.postgres.replays import Replay
from processor.settings.schema import Settings


@grouped
def cancel(config_file: ConfigFile, name: Name, *, reason: Reason = None, output: Output) -> None:
    """End a replay for good: the process that works on it stops, and what it has done stays done.

    \b
    processor replay cancel shop.toml rebuild
    processor replay cancel shop.toml rebuild --reason "peak hours"
    """

    async def act(settings: Settings) -> Replay:
        async with connections.with_tables(settings) as db:
            return await control.cancel(db, settings.consumer, name, user(), reason)

    replay = asyncio.run(act(load(config_file)))
    if output.format is Format.TABLE:
        typer.echo(f"{replay.name}: {replay.state}")
    else:
        (print_json if output.format is Format.JSON else print_line)(as_json(replay))
