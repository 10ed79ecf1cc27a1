"""`processor inbox list`."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from typing import Annotated, Any

import typer

from processor.cli.arguments import ConfigFile, WrongUse, grouped, storable
from processor.cli.deployment import load
from processor.cli.dlq.filters import key_bytes, moment
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
from processor.operations import inbox
from processor.operations.inbox import Page
from processor.postgres import connections
from processor.postgres.look_up import STATUSES, Place, Wanted
from processor.settings.schema import Settings

TITLES = ("id", "status", "type", "place", "key", "attempts", "result", "first seen", "finished", "inbox key")
COLOURS = {"failed": "red", "parked": "yellow", "discarded": "dim", "completed": "green"}


@grouped
def list_(
    config_file: ConfigFile,
    *,
    ids: Annotated[list[str] | None, typer.Option("--id", help="Message id; may be repeated.")] = None,
    status: Annotated[
        list[str] | None,
        typer.Option(help=f"{', '.join(STATUSES)}; may be repeated. Default: all.", show_default=False),
    ] = None,
    type_: Annotated[
        str | None, typer.Option("--type", help="Message type; the row of a completed message rarely has it.")
    ] = None,
    key: Annotated[str | None, typer.Option("--key", help="Key of a record that did not complete, as text.")] = None,
    key_hex: Annotated[str | None, typer.Option("--key-hex", help="The same, its bytes in hexadecimal.")] = None,
    topic: Annotated[str | None, typer.Option("--topic", help="Input topic.")] = None,
    partition: Annotated[int | None, typer.Option("--partition", min=0, help="Number of the partition.")] = None,
    since: Annotated[
        str | None,
        typer.Option(
            "--since", help="First seen then or later: ISO (UTC unless it names a zone), or how long ago, such as 2h."
        ),
    ] = None,
    until: Annotated[str | None, typer.Option("--until", help="First seen before this time.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Show at most this many.")] = 100,
    after: Annotated[
        str | None, typer.Option(metavar="PLACE", help="Begin behind this place, which the page before has named.")
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.001, help="Give up a search after this many seconds.")] = 10.0,
    output: Output,
) -> None:
    """Show what the inbox has, completed messages included, page by page.

    With completed messages the order is that of inbox keys, which means
    nothing; without them it is by partition, status and time. It only reads.

    \b
    processor inbox list shop.toml --limit 20
    processor inbox list shop.toml --status failed --status parked --since 2h
    """
    now = datetime.now(UTC)
    for one in status or ():
        if one not in STATUSES:
            raise WrongUse(f"--status {one}: there is no such status; valid: {', '.join(STATUSES)}")
    wanted = Wanted(
        statuses=tuple(status or STATUSES),
        record_key=key_bytes(key, key_hex),
        type=type_,
        since=moment(since, now) if since else None,
        until=moment(until, now) if until else None,
    )
    place = Place() if after is None else inbox.read(after, wanted)
    if place is None:
        raise WrongUse(f"--after {after}: no place of a list with these filters; give what the page before has named")
    begin: Place = place

    async def act(settings: Settings) -> Page:
        async with connections.read_only(settings, timeout, inbox.SLOW) as db:
            given = [storable(id_) for id_ in ids or ()]
            return await inbox.listed(db, settings, wanted, given, topic, partition, begin, limit)

    found = asyncio.run(act(load(config_file)))
    messages = [message | key_as_json(message["key"]) for message in found.messages]
    match output.format:
        case Format.JSON:
            print_json({"messages": messages, "after": found.after})
            return
        case Format.JSONL:
            for message in messages:
                print_line(message)
        case Format.TABLE if found.messages:
            print_table(TITLES, map(_cells, found.messages), COLOURS)
        case Format.TABLE:
            typer.echo("no message matches", err=True)
    if found.after is not None:
        typer.echo(f"there are more: --after {found.after}", err=True)


def _cells(message: dict[str, Any]) -> tuple[str, ...]:
    return (
        safe(message["id"] or "-"),
        message["status"] + (" (sent)" if message["redriven_at"] else ""),
        safe(message["type"] or "-"),
        f"{message['topic']}:{message['partition']}:{message['offset']}",
        key_as_cell(message["key"]),
        str(message["attempts"]),
        "yes" if message["result"] else "-",
        time(message["received_at"]),
        time(message["finished_at"]),
        message["inbox_key"],
    )
