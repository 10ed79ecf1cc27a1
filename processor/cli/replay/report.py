"""What a dry run has found."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson
import typer

from processor.cli.output import Format, counted, print_json, print_line, safe
from processor.operations.replay.rehearsal import Report

# More are only counted; -o json has all.
SHOWN = 20
VALUE_CHARS = 200


def show(report: Report, form: Format) -> None:
    if form is not Format.TABLE:
        (print_json if form is Format.JSON else print_line)(asdict(report))
        return
    typer.echo(f"{report.processed} processed, {report.skipped} skipped, {report.failed} failed; nothing was changed")
    for reason, number in sorted(report.reasons.items()):
        typer.echo(f"failed, {reason}: {number}")
    for error in report.errors[:SHOWN]:
        typer.echo(f"  {safe(error['message_id'])} at {error['place']}: {safe(' '.join(error['detail'].split()))}")
    found = report.comparison
    if found is None:
        typer.echo("interrupted: outputs were not compared")
        return
    different = ", ".join(f"{number} {name}" for name, number in sorted(found.different.items()))
    typer.echo(f"outputs: {found.same} the same{', ' if different else ''}{different}")
    if found.messages:
        typer.echo(f"{counted(len(found.messages), 'message')} with other outputs than were sent:")
        for message_id in found.messages[:SHOWN]:
            typer.echo(f"  {safe(message_id)}")
        if len(found.messages) > SHOWN:
            typer.echo(f"  and {len(found.messages) - SHOWN} more: -o json has them all")
    for sample in found.samples:
        typer.echo(f"{safe(sample['message_id'])}: {sample['difference']}")
        typer.echo(f"  sent {_brief(sample['sent'])}")
        typer.echo(f"  now  {_brief(sample['made'])}")


def _brief(output: dict[str, Any] | None) -> str:
    if output is None:
        return "-"
    text = orjson.dumps(output).decode()
    return safe(text if len(text) <= VALUE_CHARS else f"{text[:VALUE_CHARS]}…")
