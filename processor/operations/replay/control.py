"""Replays that exist: paused, cancelled, and what else an operator does to one that another process may be running."""

from __future__ import annotations

from typing import TYPE_CHECKING

from processor.operations.replay.plan import Refused
from processor.operations.replay.run import event, load
from processor.postgres import replays
from processor.postgres.replays import UNFINISHED, Replay

if TYPE_CHECKING:
    from processor.postgres.session import Connection


async def pause(connection: Connection, consumer: str, name: str, by: str, reason: str | None) -> Replay:
    """Let the process that runs it stop after its current batch."""
    return await _move(connection, consumer, name, ("active",), "paused", by, reason)


async def cancel(connection: Connection, consumer: str, name: str, by: str, reason: str | None) -> Replay:
    """End it for good; what it has done stays done."""
    return await _move(connection, consumer, name, UNFINISHED, "cancelled", by, reason)


async def _move(
    connection: Connection, consumer: str, name: str, before: tuple[str, ...], after: str, by: str, reason: str | None
) -> Replay:
    replay = await load(connection, consumer, name)
    if not await replays.move(connection, consumer, name, before, after, event(after, by, reason)):
        raise Refused(f"the replay {name} is {replay.state}: it cannot be {after}")
    return await load(connection, consumer, name)
