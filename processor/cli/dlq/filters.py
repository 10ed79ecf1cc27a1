"""The options that say which messages a command is about."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated

import typer

from processor.cli.arguments import WrongUse, storable
from processor.postgres.dead_letters import REPAIRABLE, STATUSES, Filter

All = Annotated[bool, typer.Option("--all", help="Everything that failed or is parked; not together with a filter.")]

_REASON = "Name of the error's reason, such as undecodable."


@dataclass(frozen=True, slots=True)
class Filters:
    ids: Annotated[list[str] | None, typer.Option("--id", help="Message id; may be repeated.")] = None
    key: Annotated[str | None, typer.Option("--key", help="Key of the record, as text.")] = None
    key_hex: Annotated[str | None, typer.Option("--key-hex", help="Key of the record, its bytes in hexadecimal.")] = (
        None
    )
    type_: Annotated[str | None, typer.Option("--type", help="Message type.")] = None
    class_: Annotated[str | None, typer.Option("--class", help="Class of the error: poison, transient or bug.")] = None
    error_reason: Annotated[str | None, typer.Option("--reason", "--error-reason", help=_REASON)] = None
    topic: Annotated[str | None, typer.Option("--topic", help="Input topic.")] = None
    partition: Annotated[int | None, typer.Option("--partition", min=0, help="Number of the partition.")] = None
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="Last failed at this time or later: ISO (UTC unless it names a zone), or how long ago, such as 2h.",
        ),
    ] = None
    until: Annotated[str | None, typer.Option("--until", help="Last failed before this time.")] = None

    def wanted(self, statuses: list[str] | None = None, *, despite_collision: bool = False) -> Filter:
        now = datetime.now(UTC)
        for status in statuses or ():
            if status not in STATUSES:
                raise WrongUse(f"--status {status}: there is no such status; valid: {', '.join(STATUSES)}")
        return Filter(
            ids=tuple(map(storable, self.ids or ())),
            key=key_bytes(self.key, self.key_hex),
            type=self.type_,
            error_class=self.class_,
            reason=self.error_reason,
            topic=self.topic,
            partition=self.partition,
            since=moment(self.since, now) if self.since else None,
            until=moment(self.until, now) if self.until else None,
            statuses=tuple(statuses or REPAIRABLE),
            despite_collision=despite_collision,
        )


@dataclass(frozen=True, slots=True)
class FiltersBesideReason(Filters):
    """For a command whose own --reason means another one."""

    error_reason: Annotated[str | None, typer.Option("--error-reason", help=_REASON)] = None


def require_choice(wanted: Filter, all_: bool) -> None:
    """No command that changes something takes all messages by accident."""
    if not wanted.is_given() and not all_:
        raise WrongUse("which messages? Give at least one filter, such as --id or --key, or --all")
    if wanted.is_given() and all_:
        raise WrongUse("--all is for all messages: leave it out, or the filters")


def moment(text: str, now: datetime) -> datetime:
    """An ISO time, UTC unless it names a zone, or how long ago, as in 2h or 1d12h."""
    ago = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", text.strip())
    try:
        if ago and any(ago.groups()):
            days, hours, minutes, seconds = (int(number or 0) for number in ago.groups())
            return now - timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
        at = datetime.fromisoformat(text.strip())
    except (ValueError, OverflowError):
        raise WrongUse(
            f"{text!r} is no time: give one such as 2025-03-01T12:00Z, or how long ago, such as 2h"
        ) from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def key_bytes(key: str | None, key_hex: str | None) -> bytes | None:
    if key is not None and key_hex is not None:
        raise WrongUse("give either --key or --key-hex, not both")
    if key_hex is None:
        return None if key is None else key.encode(errors="surrogateescape")
    try:
        return bytes.fromhex(key_hex.removeprefix("0x"))
    except ValueError:
        raise WrongUse(f"--key-hex {key_hex}: not hexadecimal; two digits for each byte, as in 00ff") from None
