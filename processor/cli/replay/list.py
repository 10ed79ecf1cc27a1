"""`processor replay list`."""

from __future__ import annotations

import asyncio

import typer

from processor.cli.arguments import ConfigFile, grouped
from processor.cli.deployment import load
from processor.cli.output import Format, Output, print_json, print_line, print_table, safe
from processor.cli.replay.foreground import as_json
from processor.postgres import connections, replays
from processor.postgres.replays import Replay
from processor.settings.schema import Settings

TITLES = ("name", "mode", "state", "done", "processed", "skipped", "failed", "outputs", "made", "by")
COLOURS = {"active": "green", "paused": "yellow", "cancelled": "dim", "finished": "dim"}


@grouped
def list_(config_file: ConfigFile, *, output: Output) -> None:
    """Show all replays of this consumer, oldest first, and how far they are.

    \b
    processor replay list shop.toml
    processor replay list shop.toml -o jsonl
    """

    async def act(settings: Settings) -> list[Replay]:
        async with connections.with_tables(settings) as db:
            return await replays.find(db, settings.consumer)

    found = asyncio.run(act(load(config_file)))
    if output.format is Format.JSON:
        print_json({"replays": [as_json(replay) for replay in found]})
    elif output.format is Format.JSONL:
        for replay in found:
            print_line(as_json(replay))
    elif found:
        print_table(TITLES, map(_cells, found), COLOURS)
    else:
        typer.echo("no replay was ever made", err=True)


def _cells(replay: Replay) -> tuple[str, ...]:
    shown, made = as_json(replay), replay.history[0]
    return (
        replay.name,
        str(shown["plan"]["mode"]),
        replay.state,
        f"{shown['offsets_done']} of {shown['offsets']}",
        *(str(shown[name]) for name in ("processed", "skipped", "failed", "outputs")),
        str(made["at"]),
        safe(str(made["by"])),
    )
