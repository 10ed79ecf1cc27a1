"""`processor dlq show`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from processor.cli.arguments import WrongUse, grouped, storable
from processor.cli.deployment import load
from processor.cli.output import Format, Output, bytes_as_text, key_as_json, print_json, print_line, safe, time
from processor.operations import names
from processor.postgres import connections
from processor.settings.schema import Settings

HEX_DIGITS = 64  # in a line
TYPE = "Message type, where messages of several types may have this id (message.scope_by_type)."


@grouped
def show(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[CONFIG] ID", help="CONFIG can be left out if PROCESSOR_CONFIG is set."),
    ],
    *,
    type_: Annotated[str | None, typer.Option("--type", help=TYPE)] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the payload's bytes to standard output, and nothing else.")
    ] = False,
    output: Output,
) -> None:
    """Show all that is known about one message: payload, headers, error, history."""
    config_file, message_id = config_and_id(words, "dlq show")

    async def act(settings: Settings) -> dict[str, Any]:
        async with connections.with_tables(settings) as db:
            return await names.shown(db, settings, message_id, type_)

    row = asyncio.run(act(load(config_file)))
    if raw:
        sys.stdout.buffer.write(row["payload"] or b"")
        return
    print_message(row, output.format)


def print_message(row: dict[str, Any], form: Format) -> None:
    """Everything that the inbox has about it."""
    message = _message(row)
    match form:
        case Format.JSON:
            print_json(message)
        case Format.JSONL:
            print_line(message)
        case Format.TABLE:
            _print(message)


def config_and_id(words: list[str], command: str) -> tuple[Path, str]:
    named = os.environ.get("PROCESSOR_CONFIG")
    if len(words) == 1 and named:
        words = [named, *words]
    if len(words) != 2:
        raise WrongUse(f"give the configuration file and one message id: processor {command} CONFIG ID [--type TYPE]")
    return Path(words[0]), storable(words[1])


def _message(row: dict[str, Any]) -> dict[str, Any]:
    """Everything, in the order in which it is shown."""
    names = ("status", "type", "topic", "partition", "offset")
    times = ("received_at", "first_failed_at", "finished_at", "redriven_at", "lease_until")
    kept = row["record_key"] is not None or row["payload"] is not None or row["headers"] is not None
    return {
        "id": row["message_id"],
        "inbox_key": str(row["key"]),
        **{name: row[name] for name in names},
        "timestamp_ms": row["timestamp_ms"],
        **key_as_json(row["record_key"]),
        "parked": row["parked_key"] is not None,
        "attempts": row["attempts"],
        "unfinished": row["unfinished"],
        **{name: row[name] for name in times},
        "lease_owner": row["lease_owner"],
        "result": row["result"],
        "error": row["error"],
        # The service may have processed a message before the command that sent it could record that.
        "history": sorted(row["history"], key=lambda event: _instant(event.get("at"))),
        "record_kept": kept,
        "headers": [[name, *bytes_as_text(value)] for name, value in row["headers"] or ()],
        "payload": dict(zip(("data", "encoding"), bytes_as_text(row["payload"]), strict=True)),
    }


def _print(message: dict[str, Any]) -> None:
    echo = typer.echo
    error, history, headers, payload = (message.pop(name) for name in ("error", "history", "headers", "payload"))
    kept = message.pop("record_kept")
    key, key_hex = message.pop("key"), message.pop("key_hex")
    echo(f"id               {safe(message.pop('id'))}")
    echo(f"key              {'null' if key_hex is None else f'0x{key_hex}' if key is None else safe(key)}")
    for name, value in message.items():
        if value is not None:
            text = time(value) if isinstance(value, datetime) else safe(str(value))
            echo(f"{name.replace('_', ' '):<16} {text}")
    if error:
        echo("\nerror")
        for name, value in error.items():
            if value is not None and name != "traceback":
                echo(f"  {name:<14} {safe(str(value))}")
        if error.get("traceback"):
            echo("\n" + safe(error["traceback"].rstrip()))
    if history:
        echo("\nhistory")
        for event in history:
            rest = "  ".join(f"{name}={value}" for name, value in event.items() if name not in ("at", "event"))
            echo(f"  {safe(str(event.get('at')))}  {safe(str(event.get('event')))}  {safe(rest)}".rstrip())
    if not kept:
        echo("\nthe record is not kept")
        return
    echo("\nheaders" if headers else "\nno headers")
    for name, text, encoding in headers:
        echo(f"  {safe(name)}: {'null' if encoding is None else f'0x{text}' if encoding == 'hex' else safe(text)}")
    echo("\npayload")
    echo(pretty(**payload))


def pretty(data: str | None, encoding: str | None) -> str:
    """A payload for people: JSON indented, other text as it is, hex in lines."""
    if data is None:
        return "null"
    if encoding == "hex":
        return "\n".join(data[at : at + HEX_DIGITS] for at in range(0, len(data), HEX_DIGITS))
    try:
        return safe(json.dumps(json.loads(data), indent=2, ensure_ascii=False))
    except (ValueError, RecursionError):
        return data


def _instant(text: str | None) -> float:
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return 0.0
