"""`processor dlq`: what failed and what waits behind it, from the command line."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from processor.cli.arguments import ConfigFile, user
from processor.cli.deployment import load
from processor.settings.schema import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from asyncpg import Record as Row

    from processor.operations.dead_letters import Filter, Outcome, Scope, Watcher

EPILOG = (
    "Environment: PROCESSOR_CONFIG names the configuration file."
    "\n\nExit status: 0 done, 1 a server is not as needed, there is no such message, or a message failed again,"
    " 2 wrong usage or bad configuration, 130 interrupted."
)
# A JSON document is read into memory by whoever gets it.
DRY_RUN_MESSAGES = 1000
# More are counted only; `dlq list` has them all.
IDS_SHOWN = 10

app = typer.Typer(
    name="dlq",
    no_args_is_help=True,
    help="Messages that failed or are parked: list them, look at one, send them once more, or give them up.",
    epilog=EPILOG,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document and nothing else.")]
Ids = Annotated[list[str] | None, typer.Option("--id", help="Message id; may be repeated.")]
Key = Annotated[str | None, typer.Option("--key", help="Key of the record, as text.")]
KeyHex = Annotated[str | None, typer.Option("--key-hex", help="Key of the record, its bytes in hexadecimal.")]
Type = Annotated[str | None, typer.Option("--type", help="Message type.")]
Class = Annotated[str | None, typer.Option("--class", help="Class of the error: poison, transient or bug.")]
Reason = Annotated[
    str | None, typer.Option("--reason", "--error-reason", help="Name of the error's reason, such as undecodable.")
]
ErrorReason = Annotated[
    str | None, typer.Option("--error-reason", help="Name of the error's reason, such as undecodable.")
]
Topic = Annotated[str | None, typer.Option("--topic", help="Input topic.")]
PartitionNumber = Annotated[int | None, typer.Option("--partition", min=0, help="Number of the partition.")]
Since = Annotated[
    str | None,
    typer.Option(
        "--since", help="Last failed at this time or later: ISO (UTC unless it says so), or as long ago as 2h."
    ),
]
Until = Annotated[str | None, typer.Option("--until", help="Last failed before this time.")]
All = Annotated[bool, typer.Option("--all", help="Without any filter: all that failed or is parked.")]


@app.command("list", epilog=EPILOG)
def list_(
    config_file: ConfigFile,
    ids: Ids = None,
    key: Key = None,
    key_hex: KeyHex = None,
    type_: Type = None,
    class_: Class = None,
    reason: Reason = None,
    topic: Topic = None,
    partition: PartitionNumber = None,
    since: Since = None,
    until: Until = None,
    status: Annotated[
        list[str] | None,
        typer.Option(
            help="failed, parked, discarded, pending or processing; may be repeated. Default: failed and parked.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Show at most so many.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show what failed or is parked, by partition and offset."""
    from processor.operations import dead_letters

    wanted = _filter(ids, key, key_hex, type_, class_, reason, topic, partition, since, until, status)

    async def act(settings: Settings) -> dead_letters.Listing:
        async with dead_letters.opened(settings) as db:
            return await dead_letters.listed(db, settings.consumer, wanted, limit)

    found = asyncio.run(act(load(config_file)))
    more = found.total - len(found.messages)
    if as_json:
        messages = [message | _key_as_json(message["key"]) for message in found.messages]
        _print_json({"messages": messages, "total": found.total, "more": more})
        return
    if not found.messages:
        typer.echo("no message matches", err=True)
        return
    _print_table(found.messages)
    if more:
        typer.echo(f"{more} more: narrow the filters, or raise --limit", err=True)


@app.command(epilog=EPILOG)
def show(
    words: Annotated[
        list[str],
        typer.Argument(metavar="[CONFIG] ID", help="CONFIG can be left out if PROCESSOR_CONFIG is set."),
    ],
    raw: Annotated[
        bool, typer.Option("--raw", help="Write the payload's bytes to standard output, and nothing else.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show all that is known about one message: payload, headers, error, history."""
    from processor.operations import dead_letters

    config_file, message_id = _config_and_id(words)

    async def act(settings: Settings) -> Row:
        async with dead_letters.opened(settings) as db:
            return await dead_letters.shown(db, settings.consumer, message_id)

    row = asyncio.run(act(load(config_file)))
    if raw:
        sys.stdout.buffer.write(row["payload"] or b"")
        return
    message = _message(row, message_id)
    if as_json:
        _print_json(message)
    else:
        _print_message(message)


@app.command(epilog=EPILOG)
def redrive(
    config_file: ConfigFile,
    ids: Ids = None,
    key: Key = None,
    key_hex: KeyHex = None,
    type_: Type = None,
    class_: Class = None,
    reason: Reason = None,
    topic: Topic = None,
    partition: PartitionNumber = None,
    since: Since = None,
    until: Until = None,
    all_: All = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also those that were sent already and are not processed yet.")
    ] = False,
    despite_collision: Annotated[
        bool,
        typer.Option(
            "--despite-collision",
            help="Only with --id: process these although their id was another message's first, each as one of its own.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be sent.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Send at most so many; of a parked key, all that belongs to it.")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Messages per second.")] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Wait until the service has processed what was sent, and say how it went."
        ),
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds without any progress of the service after which waiting ends.")
    ] = 60,
    as_json: AsJson = False,
) -> None:
    """Send messages once more through the input topic, with their bytes and their ids.

    Needs no record in Kafka: the inbox has it. A message that fails again is failed again. May be interrupted
    and run again at any time: what was processed is not processed twice. Collisions are left alone unless named.
    """
    from processor.operations import dead_letters

    wanted = _filter(ids, key, key_hex, type_, class_, reason, topic, partition, since, until)
    _require_choice(wanted, all_)
    if despite_collision and not ids:
        raise dead_letters.WrongUse("--despite-collision is for messages that are named: give their --id")
    wanted = replace(wanted, despite_collision=despite_collision)
    settings = load(config_file)

    async def preview() -> None:
        async with dead_letters.opened(settings) as db:
            scopes = await dead_letters.plan(db, settings.consumer, wanted, again=again, limit=limit)
            rows = dead_letters.to_send(db, scopes)
            await (_preview_json(scopes, rows) if as_json else _preview(scopes, rows))

    async def act() -> tuple[Outcome, int]:
        with _display(quiet=as_json) as watcher, _stopped_by_signals() as stop:
            async with dead_letters.opened(settings) as db:
                scopes = await dead_letters.plan(db, settings.consumer, wanted, again=again, limit=limit)
                left = await dead_letters.collisions(db, settings.consumer, wanted)
                if not scopes:
                    return dead_letters.Outcome(collisions=left), await dead_letters.waiting(
                        db, settings.consumer, wanted
                    )
                sender = dead_letters.Sender(settings.kafka, settings.consumer, rate, stop)
                allowed = wanted.allowed(settings.consumer)
                doing = dead_letters.Redrive(db, sender, scopes, allowed, user(), stop, watcher)
                doing.outcome.collisions = left
                return await doing.run(timeout if wait else None), 0

    if dry_run:
        asyncio.run(preview())
        return
    outcome, waiting = asyncio.run(act())
    if as_json:
        _print_json(_outcome_as_json(outcome, waiting))
    else:
        _print_outcome(outcome, waiting, timeout, waited=wait)
    if outcome.interrupted:
        raise typer.Exit(130)
    if not outcome.ok:
        raise typer.Exit(1)


@app.command(epilog=EPILOG)
def discard(
    config_file: ConfigFile,
    reason: Annotated[str, typer.Option("--reason", help="Why; kept with the message.")],
    ids: Ids = None,
    key: Key = None,
    key_hex: KeyHex = None,
    type_: Type = None,
    class_: Class = None,
    error_reason: ErrorReason = None,
    topic: Topic = None,
    partition: PartitionNumber = None,
    since: Since = None,
    until: Until = None,
    all_: All = False,
    by: Annotated[
        str | None, typer.Option(help="Who; kept with the message. Default: user@host.", show_default=False)
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Give messages up for good; their rows stay, with who, when and why. The service skips them from then on."""
    from processor.operations import dead_letters

    wanted = _filter(ids, key, key_hex, type_, class_, error_reason, topic, partition, since, until)
    _require_choice(wanted, all_)
    if not reason.strip():
        raise dead_letters.WrongUse("--reason is empty: say why, it is kept with the message")
    if not yes and not sys.stdin.isatty():
        raise dead_letters.WrongUse("nobody is there to confirm: give --yes to discard without being asked")

    settings = load(config_file)

    async def count() -> int:
        async with dead_letters.opened(settings) as db:
            return await dead_letters.count(db, settings.consumer, wanted)

    async def act() -> tuple[int, int]:
        async with dead_letters.opened(settings) as db:
            return await dead_letters.discard(db, settings.consumer, wanted, _plain(by or user()), _plain(reason))

    number = None if yes else asyncio.run(count())
    if number:
        typer.confirm(f"give up {number} message{'s' if number != 1 else ''} for good?", abort=True, err=True)
    done, parked = (0, 0) if number == 0 else asyncio.run(act())
    if as_json:
        _print_json({"discarded": done, "keys_still_parked": parked})
        return
    typer.echo(f"discarded {done}" if done else "nothing to discard: no failed or parked message matches")
    if parked:
        typer.echo(f"{parked} of their keys still have parked messages: send those with `processor dlq redrive`")


def _filter(
    ids: list[str] | None,
    key: str | None,
    key_hex: str | None,
    type_: str | None,
    class_: str | None,
    reason: str | None,
    topic: str | None,
    partition: int | None,
    since: str | None,
    until: str | None,
    statuses: list[str] | None = None,
) -> Filter:
    from processor.operations import dead_letters

    now = datetime.now(UTC)
    for status in statuses or ():
        if status not in dead_letters.STATUSES:
            raise dead_letters.WrongUse(
                f"--status {status}: there is no such status; valid: {', '.join(dead_letters.STATUSES)}"
            )
    return dead_letters.Filter(
        ids=tuple(map(_plain, ids or ())),
        key=_key_bytes(key, key_hex),
        type=type_,
        error_class=class_,
        reason=reason,
        topic=topic,
        partition=partition,
        since=dead_letters.moment(since, now) if since else None,
        until=dead_letters.moment(until, now) if until else None,
        statuses=tuple(statuses or dead_letters.REPAIRABLE),
    )


def _key_bytes(key: str | None, key_hex: str | None) -> bytes | None:
    from processor.operations import dead_letters

    if key is not None and key_hex is not None:
        raise dead_letters.WrongUse("give either --key or --key-hex, not both")
    if key_hex is None:
        return None if key is None else key.encode(errors="surrogateescape")
    try:
        return bytes.fromhex(key_hex.removeprefix("0x"))
    except ValueError:
        raise dead_letters.WrongUse(
            f"--key-hex {key_hex}: not hexadecimal; two digits for each byte, as in 00ff"
        ) from None


def _require_choice(wanted: Filter, all_: bool) -> None:
    from processor.operations import dead_letters

    if not wanted.is_given() and not all_:
        raise dead_letters.WrongUse("which messages? Give at least one filter, such as --id or --key, or --all")
    if wanted.is_given() and all_:
        raise dead_letters.WrongUse("--all is for all messages: leave it out, or the filters")


def _config_and_id(words: list[str]) -> tuple[Path, str]:
    from processor.operations import dead_letters

    named = os.environ.get("PROCESSOR_CONFIG")
    if len(words) == 1 and named:
        words = [named, *words]
    if len(words) != 2:
        raise dead_letters.WrongUse("give the configuration file and one message id: processor dlq show CONFIG ID")
    return Path(words[0]), _plain(words[1])


def _plain(text: str) -> str:
    """What came in as bytes that are no UTF-8 can be kept nowhere."""
    return text.encode(errors="replace").decode()


@contextmanager
def _stopped_by_signals() -> Iterator[asyncio.Event]:
    """Set by the first SIGINT or SIGTERM; the second one ends the process, which is as safe as any crash."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)


class Silent:
    """Says nothing: what suits JSON."""

    def begin(self, total: int) -> None:
        return None

    def sent(self, outcome: Outcome) -> None:
        return None

    def waiting(self, outcome: Outcome) -> None:
        return None


class Lines(Silent):
    """A line for each tenth."""

    def __init__(self) -> None:
        self._told = 0
        self._waits = False

    def sent(self, outcome: Outcome) -> None:
        if outcome.sent - self._told >= max(outcome.total / 10, 1) or outcome.sent == outcome.total:
            self._told = outcome.sent
            typer.echo(f"sent {outcome.sent} of {max(outcome.sent, outcome.total)}", err=True)

    def waiting(self, outcome: Outcome) -> None:
        if not self._waits:
            self._waits = True
            typer.echo(f"waiting for the service to process {_left(outcome)}", err=True)


class Bar:
    """One line that moves, gone when the work is done."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task = progress.add_task("sending", total=None)

    def begin(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def sent(self, outcome: Outcome) -> None:
        self._progress.update(self._task, completed=outcome.sent, total=max(outcome.sent, outcome.total))

    def waiting(self, outcome: Outcome) -> None:
        self._progress.update(self._task, description=f"sent; waiting for {_left(outcome)}")


@contextmanager
def _display(*, quiet: bool) -> Iterator[Watcher]:
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Silent() if quiet else Lines()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        yield Bar(progress)


def _keys(number: int) -> str:
    return f"{number} parked key{'s' if number != 1 else ''}"


def _left(outcome: Outcome) -> str:
    messages = f"{outcome.left} message{'s' if outcome.left != 1 else ''}" if outcome.left else ""
    return " and ".join(filter(None, (messages, _keys(outcome.keys_left) if outcome.keys_left else "")))


async def _preview(scopes: list[Scope], pages: Any) -> None:
    async for scope, rows in pages:
        for row in rows:
            place = f"{scope.partition.topic}:{scope.partition.number}"
            fields = (_safe(row["message_id"]), row["status"], _safe(row["type"] or "-"), _key_text(row["record_key"]))
            typer.echo("\t".join((f"would send to {place}", *fields, f"{row['bytes']} bytes")))
    total = sum(scope.total for scope in scopes)
    keys = sum(len(scope.keys) for scope in scopes)
    typer.echo(f"{total} to send" + (f", with all that waits behind {_keys(keys)}" if keys else ""), err=True)


async def _preview_json(scopes: list[Scope], pages: Any) -> None:
    messages: list[dict[str, Any]] = []
    async for scope, rows in pages:
        for row in rows[: DRY_RUN_MESSAGES - len(messages)]:
            fields = {name: row[name] for name in ("status", "type", "offset", "bytes")}
            place = {"topic": scope.partition.topic, "partition": scope.partition.number}
            messages.append({"id": row["message_id"], **fields, **place, **_key_as_json(row["record_key"])})
        if len(messages) == DRY_RUN_MESSAGES:
            break
    total = sum(scope.total for scope in scopes)
    more = max(total - len(messages), 0)
    _print_json({"dry_run": True, "total": total, "messages": messages, "more": more})


def _outcome_as_json(outcome: Outcome, waiting: int) -> dict[str, Any]:
    return {
        "ok": outcome.ok and not outcome.interrupted,
        "sent": outcome.sent,
        "completed": outcome.completed if outcome.followed else None,
        "sent_before": waiting,
        "keys": outcome.keys,
        "keys_still_parked": outcome.keys_left,
        "collisions": outcome.collisions,
        "failed_again": outcome.failed_again,
        "held_by_collisions": outcome.held,
        "held_elsewhere": outcome.elsewhere,
        "passed_over": outcome.passed_over,
        "stalled": outcome.stalled,
        "interrupted": outcome.interrupted,
    }


def _print_outcome(outcome: Outcome, waiting: int, timeout: float, *, waited: bool) -> None:
    if outcome.interrupted:
        typer.echo(
            f"interrupted: {outcome.sent} of {max(outcome.total, outcome.sent)} sent and marked; "
            + (
                "run the command again for the rest"
                if outcome.sent < outcome.total
                else "the service will process them"
            )
        )
        return
    if not outcome.sent and not outcome.keys:
        sent_before = f"; {waiting} were sent already, which --again repeats" if waiting else ""
        others = "other " if outcome.collisions else ""
        typer.echo(f"nothing to send: no {others}failed or parked message matches{sent_before}")
        _print_collisions(outcome)
        return
    typer.echo(f"{outcome.sent} sent" + (f": {_became(outcome)}" if outcome.followed else ""))
    _print_collisions(outcome)
    _print_ids("failed again", outcome.failed_again, "processor dlq show CONFIG ID tells why")
    _print_ids("not taken by the service", outcome.passed_over, "its log says why")
    _print_ids("came here too and keeps its key parked", outcome.elsewhere, "redrive it in its own partition")
    _print_ids("a collision keeps its key parked", outcome.held, "discard it, or redrive it with --despite-collision")
    if outcome.stalled:
        typer.echo(
            f"nothing has moved for {timeout:g} s: the service seems not to be running, or to wait for something"
            " itself (its log tells); what was sent is processed when it can, then run the command again",
            err=True,
        )
    elif not waited and outcome.keys_left:
        typer.echo(f"not waiting: {_keys(outcome.keys_left)} not free yet; run the command again to free them all")
    elif outcome.keys and outcome.ok:
        typer.echo(f"freed {_keys(outcome.keys)}")


def _became(outcome: Outcome) -> str:
    parts = [f"{outcome.completed} completed", f"{len(outcome.failed_again)} failed again"]
    parts += [f"{outcome.parked} parked still"] if outcome.parked else []
    parts += [f"{outcome.left} not processed yet"] if outcome.left else []
    return ", ".join(parts)


def _print_collisions(outcome: Outcome) -> None:
    if outcome.collisions:
        typer.echo(
            f"left alone: {outcome.collisions} with the id of another message; look at each with `processor dlq show`,"
            " then discard it, or redrive it with --id and --despite-collision",
            err=True,
        )


def _print_ids(what: str, ids: list[str], hint: str) -> None:
    for id_ in ids[:IDS_SHOWN]:
        typer.echo(f"{what}: {_safe(id_)}; {hint}", err=True)
    if len(ids) > IDS_SHOWN:
        typer.echo(f"{what}: {len(ids) - IDS_SHOWN} more", err=True)


def _print_table(messages: list[dict[str, Any]]) -> None:
    titles = ("id", "status", "type", "place", "key", "class", "reason", "attempts", "last failure", "error")
    rows = [_cells(message) for message in messages]
    console = Console()
    if not console.is_terminal:
        for row in (titles, *rows):
            typer.echo("\t".join(row))
        return
    colours = {"failed": "red", "parked": "yellow", "discarded": "dim"}
    table = Table(*titles)
    for row in rows:
        table.add_row(*(Text(cell, colours.get(row[1], "") if cell == row[1] else "") for cell in row))
    console.print(table)


def _cells(message: dict[str, Any]) -> tuple[str, ...]:
    status = message["status"] + (" (sent)" if message["redriven_at"] else "")
    return (
        _safe(message["id"] or "-"),
        status,
        _safe(message["type"] or "-"),
        f"{message['topic']}:{message['partition']}:{message['offset']}",
        _key_text(message["key"]),
        message["class"] or "-",
        message["reason"] or "-",
        str(message["attempts"]),
        _time(message["last_failed_at"]),
        _safe(" ".join((message["message"] or "-").split()))[:200],
    )


def _message(row: Row, message_id: str) -> dict[str, Any]:
    """Everything, in the order in which it is shown."""
    from processor.operations.dead_letters import headers_of

    names = ("status", "type", "topic", "partition", "offset")
    times = ("received_at", "first_failed_at", "finished_at", "redriven_at", "lease_until")
    history = orjson.loads(row["history"] or "[]")
    kept = row["record_key"] is not None or row["payload"] is not None or row["headers"] is not None
    return {
        "id": row["message_id"] or message_id,
        "inbox_key": str(row["key"]),
        **{name: row[name] for name in names},
        "timestamp_ms": row["timestamp_ms"],
        **_key_as_json(row["record_key"]),
        "parked": row["parked_key"] is not None,
        "attempts": row["attempts"],
        "starts": row["starts"],
        **{name: row[name] for name in times},
        "lease_owner": row["lease_owner"],
        "result": orjson.loads(row["result"]) if row["result"] else None,
        "error": orjson.loads(row["error"]) if row["error"] else None,
        # The service may have processed a message before the command that sent it could note so.
        "history": sorted(history, key=lambda event: _instant(event.get("at"))),
        "record_kept": kept,
        "headers": [[name, *_bytes_as_text(value)] for name, value in headers_of(row["headers"])],
        "payload": dict(zip(("data", "encoding"), _bytes_as_text(row["payload"]), strict=True)),
    }


def _print_message(message: dict[str, Any]) -> None:
    echo = typer.echo
    error, history, headers, payload = (message.pop(name) for name in ("error", "history", "headers", "payload"))
    kept = message.pop("record_kept")
    key, key_hex = message.pop("key"), message.pop("key_hex")
    echo(f"id               {_safe(message.pop('id'))}")
    echo(f"key              {'null' if key_hex is None else f'0x{key_hex}' if key is None else _safe(key)}")
    for name, value in message.items():
        if value is not None:
            text = _time(value) if isinstance(value, datetime) else _safe(str(value))
            echo(f"{name.replace('_', ' '):<16} {text}")
    if error:
        echo("\nerror")
        for name, value in error.items():
            if value is not None and name != "traceback":
                echo(f"  {name:<14} {_safe(str(value))}")
        if error.get("traceback"):
            echo("\n" + _safe(error["traceback"].rstrip()))
    if history:
        echo("\nhistory")
        for event in history:
            rest = "  ".join(f"{name}={value}" for name, value in event.items() if name not in ("at", "event"))
            echo(f"  {_safe(str(event.get('at')))}  {_safe(str(event.get('event')))}  {_safe(rest)}".rstrip())
    if not kept:
        echo("\nthe record is not kept")
        return
    echo("\nheaders" if headers else "\nno headers")
    for name, text, encoding in headers:
        echo(f"  {_safe(name)}: {'null' if encoding is None else f'0x{text}' if encoding == 'hex' else _safe(text)}")
    echo("\npayload")
    echo(_pretty(**payload))


def _pretty(data: str | None, encoding: str | None) -> str:
    if data is None:
        return "null"
    if encoding == "hex":
        lines = (data[at : at + 64] for at in range(0, len(data), 64))
        return "\n".join(lines)
    try:
        return _safe(json.dumps(json.loads(data), indent=2, ensure_ascii=False))
    except (ValueError, RecursionError):
        return data


def _bytes_as_text(value: bytes | None) -> tuple[str | None, str | None]:
    """Text where it can be shown as such: what could steer a terminal cannot."""
    if value is None:
        return None, None
    try:
        text = value.decode()
    except UnicodeDecodeError:
        return value.hex(), "hex"
    return (text, "text") if _safe(text) == text else (value.hex(), "hex")


def _key_as_json(key: bytes | None) -> dict[str, str | None]:
    text, encoding = _bytes_as_text(key)
    return {"key": text if encoding == "text" else None, "key_hex": None if key is None else key.hex()}


def _key_text(key: bytes | None) -> str:
    text, encoding = _bytes_as_text(key)
    return "-" if text is None else f"0x{text}" if encoding == "hex" else " ".join(text.split("\n"))


def _safe(text: str) -> str:
    """With whatever could steer a terminal made visible."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)


def _time(at: datetime | None) -> str:
    return at.astimezone(UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z") if at else "-"


def _instant(text: str | None) -> float:
    try:
        return datetime.fromisoformat(text or "").timestamp()
    except ValueError:
        return 0.0


def _print_json(value: Any) -> None:
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode())
