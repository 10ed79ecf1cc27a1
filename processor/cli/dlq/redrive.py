"""`processor dlq redrive`."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from processor.cli.arguments import ConfigFile, WrongUse, grouped, user
from processor.cli.deployment import load
from processor.cli.dlq.filters import All, Filters, require_choice
from processor.cli.output import (
    Format,
    Output,
    counted,
    key_as_cell,
    key_as_json,
    print_json,
    print_line,
    safe,
)
from processor.cli.progress import Display, display
from processor.cli.signals import stopped_by_signals
from processor.operations import redrive as operation
from processor.operations.redrive import Outcome
from processor.postgres import connections
from processor.postgres.dead_letters import Brief, Filter
from processor.postgres.redrive import Scope
from processor.settings.schema import Settings

# A JSON document is read into memory as a whole; -o jsonl has no such limit.
DRY_RUN_MESSAGES = 1000
# More are only counted; `dlq list` shows them all.
IDS_SHOWN = 10


@grouped
def redrive(
    config_file: ConfigFile,
    filters: Filters,
    *,
    all_: All = False,
    again: Annotated[
        bool, typer.Option("--again", help="Also send those that were sent already and are not processed yet.")
    ] = False,
    despite_collision: Annotated[
        bool,
        typer.Option(
            "--despite-collision",
            help="Only with --id: process these, each as a message of its own, though their id belongs to another.",
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be sent.")] = False,
    limit: Annotated[
        int | None, typer.Option(min=1, help="Send at most this many; of a parked key, all that belongs to it.")
    ] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Messages per second.")] = None,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait/--no-wait", help="Wait until the service has processed what was sent, and say how it went."
        ),
    ] = True,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Stop waiting when the service has made no progress for this many seconds.")
    ] = 60,
    output: Output,
) -> None:
    """Send messages once more through the input topic, with their bytes and their ids.

    Needs no record in Kafka: the inbox has it. A message that fails again ends
    as a failed row again. May be interrupted and run again at any time: no
    message is processed twice. Collisions are left alone unless named.
    """
    wanted = filters.wanted(despite_collision=despite_collision)
    if despite_collision and not wanted.ids:
        raise WrongUse("--despite-collision is for messages that are named: give their --id")
    require_choice(wanted, all_)
    settings = load(config_file)
    if dry_run:
        asyncio.run(_preview(settings, wanted, again=again, limit=limit, form=output.format))
        return

    async def act() -> Outcome:
        with display("sent", quiet=output.format is not Format.TABLE) as shown, stopped_by_signals() as stop:
            async with connections.with_tables(settings) as db:
                return await operation.run(
                    db,
                    settings,
                    wanted,
                    again=again,
                    limit=limit,
                    rate=rate,
                    timeout_seconds=timeout if wait else None,
                    by=user(),
                    stop=stop,
                    watcher=Watcher(shown),
                )

    outcome = asyncio.run(act())
    match output.format:
        case Format.JSON:
            print_json(_as_json(outcome))
        case Format.JSONL:
            print_line(_as_json(outcome))
        case Format.TABLE:
            _print(outcome, timeout, waited=wait)
    if outcome.interrupted:
        raise typer.Exit(130)
    if not outcome.ok:
        raise typer.Exit(1)


class Watcher:
    """Shows how a redrive proceeds."""

    def __init__(self, display: Display) -> None:
        self._display = display

    def begin(self, total: int) -> None:
        self._display.begin(total)

    def sent(self, outcome: Outcome) -> None:
        self._display.done(outcome.sent, max(outcome.sent, outcome.total))

    def waiting(self, outcome: Outcome) -> None:
        self._display.waiting(f"waiting for the service to process {_left(outcome)}")


async def _preview(settings: Settings, wanted: Filter, *, again: bool, limit: int | None, form: Format) -> None:
    messages: list[dict[str, Any]] = []
    async with connections.with_tables(settings) as db:
        scopes = await operation.plan(db, settings, wanted, again=again, limit=limit)
        async for scope, rows in operation.to_send(db, scopes):
            for row in rows:
                match form:
                    case Format.TABLE:
                        typer.echo("\t".join(_cells(scope, row)))
                    case Format.JSONL:
                        print_line(_described(scope, row))
                    case Format.JSON if len(messages) < DRY_RUN_MESSAGES:
                        messages.append(_described(scope, row))
            if form is Format.JSON and len(messages) == DRY_RUN_MESSAGES:
                break
    total = sum(scope.total for scope in scopes)
    if form is Format.JSON:
        print_json({"dry_run": True, "total": total, "messages": messages, "more": max(total - len(messages), 0)})
    elif form is Format.TABLE:
        keys = sum(len(scope.keys) for scope in scopes)
        behind = f", with all that waits behind {counted(keys, 'parked key')}" if keys else ""
        typer.echo(f"{total} to send{behind}", err=True)


def _cells(scope: Scope, row: Brief) -> tuple[str, ...]:
    return (
        f"would send to {scope.partition.topic}:{scope.partition.number}",
        safe(row.message_id),
        row.status,
        safe(row.type or "-"),
        key_as_cell(row.record_key),
        f"{row.bytes} bytes",
    )


def _described(scope: Scope, row: Brief) -> dict[str, Any]:
    return {
        "id": row.message_id,
        "status": row.status,
        "type": row.type,
        "offset": row.offset,
        "bytes": row.bytes,
        "topic": scope.partition.topic,
        "partition": scope.partition.number,
        **key_as_json(row.record_key),
    }


def _as_json(outcome: Outcome) -> dict[str, Any]:
    return {
        "ok": outcome.ok and not outcome.interrupted,
        "sent": outcome.sent,
        "completed": outcome.completed if outcome.followed else None,
        "sent_before": outcome.sent_before,
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


def _print(outcome: Outcome, timeout: float, *, waited: bool) -> None:
    if outcome.interrupted:
        unsent = outcome.sent < outcome.total
        rest = "run the command again for the rest" if unsent else "the service will process them"
        typer.echo(f"interrupted: {outcome.sent} of {max(outcome.total, outcome.sent)} sent and marked; {rest}")
        return
    if not outcome.sent and not outcome.keys:
        before = f"; {outcome.sent_before} were sent already, which --again repeats" if outcome.sent_before else ""
        others = "other " if outcome.collisions else ""
        typer.echo(f"nothing to send: no {others}failed or parked message matches{before}")
        _print_collisions(outcome)
        return
    typer.echo(f"{outcome.sent} sent" + (f": {_became(outcome)}" if outcome.followed else ""))
    _print_collisions(outcome)
    _print_ids("failed again", outcome.failed_again, "processor dlq show CONFIG ID says why")
    _print_ids("not taken by the service", outcome.passed_over, "its log says why")
    _print_ids("came here too and keeps its key parked", outcome.elsewhere, "redrive it in its own partition")
    _print_ids("a collision keeps its key parked", outcome.held, "discard it, or redrive it with --despite-collision")
    if outcome.stalled:
        typer.echo(
            f"nothing has moved for {timeout:g} s: the service seems not to be running, or to wait for something"
            " itself, as its log says; it will process what was sent when it can, then run the command again",
            err=True,
        )
    elif not waited and outcome.keys_left:
        typer.echo(
            f"not waiting: {counted(outcome.keys_left, 'parked key')} not free yet;"
            " run the command again to free them all"
        )
    elif outcome.keys and outcome.ok:
        typer.echo(f"freed {counted(outcome.keys, 'parked key')}")


def _became(outcome: Outcome) -> str:
    parts = [f"{outcome.completed} completed", f"{len(outcome.failed_again)} failed again"]
    parts += [f"{outcome.parked} still parked"] if outcome.parked else []
    parts += [f"{outcome.left} not processed yet"] if outcome.left else []
    return ", ".join(parts)


def _left(outcome: Outcome) -> str:
    messages = counted(outcome.left, "message") if outcome.left else ""
    keys = counted(outcome.keys_left, "parked key") if outcome.keys_left else ""
    return " and ".join(filter(None, (messages, keys)))


def _print_collisions(outcome: Outcome) -> None:
    if outcome.collisions:
        typer.echo(
            f"left alone: {outcome.collisions} with the id of another message; look at each with `processor dlq show`,"
            " then discard it, or redrive it with --id and --despite-collision",
            err=True,
        )


def _print_ids(what: str, ids: list[str], hint: str) -> None:
    for id_ in ids[:IDS_SHOWN]:
        typer.echo(f"{what}: {safe(id_)}; {hint}", err=True)
    if len(ids) > IDS_SHOWN:
        typer.echo(f"{what}: {len(ids) - IDS_SHOWN} more", err=True)
