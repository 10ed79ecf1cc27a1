"""`processor trace`."""

from __future__ import annotations

import asyncio
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from processor.cli.arguments import WrongUse, grouped, storable
from processor.cli.deployment import load
from processor.cli.dlq.filters import key_bytes, moment
from processor.cli.dlq.show import TYPE
from processor.cli.output import Format, Output, print_json, print_line, safe
from processor.messages.message import Partition
from processor.operations.inbox import SLOW
from processor.operations.sightings import Search
from processor.operations.trace import Event, Story, Told, Tracer
from processor.postgres import connections
from processor.settings.schema import Settings

AT = re.compile(r"([A-Za-z0-9._-]+):(\d+):(\d+)")
DETAIL_CHARS = 300


@grouped
def trace(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CONFIG] [ID]", help="CONFIG can be left out if PROCESSOR_CONFIG is set."),
    ] = None,
    *,
    type_: Annotated[str | None, typer.Option("--type", help=TYPE)] = None,
    key: Annotated[
        str | None, typer.Option("--key", help="All messages with this key, as text, instead of ID.")
    ] = None,
    key_hex: Annotated[str | None, typer.Option("--key-hex", help="The same, its bytes in hexadecimal.")] = None,
    at: Annotated[
        str | None, typer.Option("--at", metavar="TOPIC:PARTITION:OFFSET", help="The message at this place.")
    ] = None,
    since: Annotated[
        str, typer.Option("--since", help="With --key: since when to look for deliveries; ISO, or how long ago.")
    ] = "1d",
    output_topic: Annotated[
        list[str] | None,
        typer.Option("--output-topic", help="Look there too for outputs, beside the topics that handlers declare."),
    ] = None,
    scan_limit: Annotated[int, typer.Option(min=1, help="Read at most this many records of each topic.")] = 100_000,
    timeout: Annotated[
        float, typer.Option(min=0.001, help="Give up a search of the inbox after so many seconds.")
    ] = 10.0,
    output: Output,
) -> None:
    """Tell the story of a message in order: where it came in, each failure, outputs, dead letter, redrives, replays.

    The inbox is asked, and Kafka is read: the input topics from one minute
    before the message was first seen, output and dead-letter topics around
    each moment at which something happened to it, or a replay went over it.
    What was not looked at is said. It only reads.

    \b
    processor trace shop.toml order-4711
    processor trace shop.toml --at orders:3:1290 --json
    """
    config_file, message_id = _words(words or [], key is not None or key_hex is not None or at is not None)
    record_key = key_bytes(key, key_hex)
    if at is not None and record_key is not None:
        raise WrongUse("give either --at or --key, not both")
    place = AT.fullmatch(at) if at is not None else None
    if at is not None and place is None:
        raise WrongUse(f"--at {at}: give topic, partition and offset, such as orders:3:1290")
    begin = moment(since, datetime.now(UTC))

    async def act(settings: Settings) -> Told:
        search = Search(settings, scan_limit)
        try:
            async with connections.read_only(settings, timeout, SLOW) as db:
                tracer = Tracer(db, settings, search, output_topic or ())
                if place is not None:
                    return await tracer.at(Partition(place[1], int(place[2])), int(place[3]))
                if record_key is not None:
                    return await tracer.by_key(record_key, begin)
                return await tracer.by_id(message_id or "", type_)
        finally:
            search.close()

    told = asyncio.run(act(load(config_file)))
    match output.format:
        case Format.JSON:
            stories = [_as_json(story) for story in told.stories]
            print_json({"messages": stories, "more": told.more, "not_looked_at": told.not_looked_at})
            return
        case Format.JSONL:
            for story in told.stories:
                for event in story.events:
                    print_line({"id": story.id, **_event_as_json(event)})
        case Format.TABLE:
            typer.echo("\n\n".join("\n".join(_lines(story)) for story in told.stories))
    for text in told.not_looked_at:
        typer.echo(f"not looked at: {safe(text)}", err=True)
    if told.more:
        typer.echo(f"{told.more} more messages with this key: give a later --since, or trace one by its id", err=True)


def _words(words: list[str], otherwise: bool) -> tuple[Path, str | None]:
    """The configuration file, and the id unless the message is given in another way."""
    named = os.environ.get("PROCESSOR_CONFIG")
    wanted = 1 if otherwise else 2
    if len(words) == wanted - 1 and named:
        words = [named, *words]
    if len(words) != wanted:
        raise WrongUse("which message? processor trace CONFIG ID, or CONFIG with --key or --at instead of ID")
    return Path(words[0]), None if otherwise else storable(words[1])


def _as_json(story: Story) -> dict[str, Any]:
    row = story.row
    names = ("status", "type", "topic", "partition", "offset", "attempts", "unfinished", "result")
    return {
        "id": story.id,
        "inbox": None if row is None else {"key": str(row["key"]), **{name: row[name] for name in names}},
        "events": [_event_as_json(event) for event in story.events],
    }


def _event_as_json(event: Event) -> dict[str, Any]:
    return {"at": event.at, "event": event.what, "place": event.place, **event.details}


def _lines(story: Story) -> list[str]:
    row = story.row
    state = "not in the inbox" if row is None else f"{row['status']}, attempts {row['attempts']}"
    lines = [f"{safe(story.id)}: {state}"]
    width = max((len(event.what) for event in story.events), default=0)
    for event in story.events:
        at = "now" if event.at is None else _time(event.at)
        details = "  ".join(f"{name}={_short(value)}" for name, value in event.details.items() if value is not None)
        parts = (f"  {at:<24}", f"{safe(event.what):<{width}}", safe(event.place or ""), safe(details))
        lines.append("  ".join(part for part in parts if part).rstrip())
    return lines


def _short(value: Any) -> str:
    text = _time(value) if isinstance(value, datetime) else " ".join(str(value).split())
    return text if len(text) <= DETAIL_CHARS else f"{text[:DETAIL_CHARS]}…"


def _time(at: datetime) -> str:
    """To the millisecond: the order is what matters."""
    return at.astimezone(UTC).isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
