"""What `pause` and `cancel` share: an order to a replay that another process may be working on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from processor.cli.arguments import user
from processor.cli.deployment import load
from processor.cli.output import Format, Output, print_json, print_line
from processor.cli.replay.foreground import as_json
from processor.postgres import connections
from processor.postgres.replays import Replay
from processor.settings.schema import Settings

if TYPE_CHECKING:
    from processor.postgres.session import Connection

# Connection, consumer, name of the replay, who, and why.
Order = Callable[["Connection", str, str, str, str | None], Awaitable[Replay]]


def give(order: Order, config_file: Path, name: str, reason: str | None, output: Output) -> None:
    """Give the order, and print how the replay stands then."""

    async def act(settings: Settings) -> Replay:
        async with connections.with_tables(settings) as db:
            return await order(db, settings.consumer, name, user(), reason)

    replay = asyncio.run(act(load(config_file)))
    if output.format is Format.TABLE:
        typer.echo(f"{replay.name}: {replay.state}")
    else:
        (print_json if output.format is Format.JSON else print_line)(as_json(replay))
