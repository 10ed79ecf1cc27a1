"""`processor dlq list`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from processor.cli.arguments import ConfigFile, grouped
from processor.cli.deployment import load
from processor.cli.dlq.filters import Filters
from processor.cli.output import (
    Format,
    Output,
    key_as_cell,
    key_as_json,
    print_json,
    print_line,
    print_table,
    safe,
    time,
)
from processor.operations import dead_letters
from processor.postgres import connections
from processor.settings.schema import Settings

TITLES = ("id", "status", "type", "place", "key", "class", "reason", "attempts", "last failure", "error")
COLOURS = {"failed": "red", "parked": "yellow", "discarded": "dim"}
ERROR_CHARS = 200


@grouped
def list_(
    config_file: ConfigFile,
    filters: Filters,
    *,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help="failed, parked, discarded, pending or processing; may be repeated. Default: failed and parked.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most this many.")] = 100,
    output: Output,
) -> None:
    """Show what failed or is parked, by partition and offset."""
    wanted = filters.wanted(status)

    async def act(settings: Settings) -> dead_letters.Listing:
        async with connections.with_tables(settings) as db:
            return await dead_letters.listed(db, settings, wanted, limit)

    found = asyncio.run(act(load(config_file)))
    more = found.total - len(found.messages)
    if output.format is Format.TABLE:
        if found.messages:
            print_table(TITLES, map(_cells, found.messages), COLOURS)
        else:
            typer.echo("no message matches", err=True)
    else:
        messages = [message | key_as_json(message["key"]) for message in found.messages]
        if output.format is Format.JSON:
            print_json({"messages": messages, "total": found.total, "more": more})
            return
        for message in messages:
            print_line(message)
    if more:
        typer.echo(f"{more} more: narrow the filters, or raise --limit", err=True)


def _cells(message: dict[str, Any]) -> tuple[str, ...]:
    return (
        safe(message["id"] or "-"),
        message["status"] + (" (sent)" if message["redriven_at"] else ""),
        safe(message["type"] or "-"),
        f"{message['topic']}:{message['partition']}:{message['offset']}",
        key_as_cell(message["key"]),
        message["class"] or "-",
        message["reason"] or "-",
        str(message["attempts"]),
        time(message["last_failed_at"]),
        safe(" ".join((message["message"] or "-").split()))[:ERROR_CHARS],
    )
