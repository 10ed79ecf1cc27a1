"""`processor replay pause`."""

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
def pause(config_file: ConfigFile, name: Name, *, reason: Reason = None, output: Output) -> None:
    """Let the process that works on a replay stop after its current batch; `resume` goes on.

    \b
    processor replay pause shop.toml rebuild
    processor replay pause shop.toml rebuild --reason "peak hours"
    """

    async def act(settings: Settings) -> Replay:
        async with connections.with_tables(settings) as db:
            return await control.pause(db, settings.consumer, name, user(), reason)

    replay = asyncio.run(act(load(config_file)))
    if output.format is Format.TABLE:
        typer.echo(f"{replay.name}: {replay.state}")
    else:
        (print_json if output.format is Format.JSON else print_line)(as_json(replay))
