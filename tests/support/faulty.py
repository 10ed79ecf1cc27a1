"""Handlers for real processes: each message says itself what is to go wrong with it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from asyncpg import DeadlockDetectedError

from processor import Database, Message, Output, Reject, Unavailable

OUTPUT = os.environ["TEST_OUTPUT_TOPIC"]
# As long as this file is there, what a handler needs is not.
DOWN = Path(os.environ.get("TEST_DOWN_FILE", "/nonexistent"))
# More than asyncio has.
MANY_THREADS = 64

_left: list[asyncio.Task[None]] = []
_tries: Counter[str] = Counter()


async def apply(message: Message[Any], db: Database) -> Output:
    """One queued row and one output; first, if the message says so, one of several ways to fail."""
    match message.value.get("do"):
        case "reject":
            raise Reject("as the message says")
        case "exit":
            os._exit(9)
        case "exit in a task":
            await asyncio.gather(_exit())
        case "block for ever":
            _block(3600)
        case "block a while":
            _block(4)
            await db.fetchval("SELECT 1")
        case "swallow":
            await _swallow()
        case "leave a task behind":
            _left.append(asyncio.create_task(_swallow()))
            raise Reject("and it will not be cancelled")
        case "leave threads behind":
            _left.extend(asyncio.create_task(asyncio.to_thread(_block, 3600)) for _ in range(MANY_THREADS))
            raise Reject("and there is none left for anybody else")
        case "deadlock twice" if _tries[message.id] < 2:
            _tries[message.id] += 1
            raise DeadlockDetectedError("deadlock detected")
        case "call" if _is_down():
            raise Unavailable("as long as the file is there")
    what = message.value["what"]
    db.write("INSERT INTO effects (what) VALUES ($1)", what)
    return _output(message)


async def apply_anew(message: Message[Any], db: Database) -> list[Output]:
    """What `apply` might be after a change: some messages have other outputs, none, more, or fail."""
    output = await apply(message, db)
    match message.value["what"]:
        case "changed":
            output.value = {"what": "changed indeed"}
        case "none now":
            return []
        case "two now":
            return [output, _output(message)]
        case "fails now":
            raise Reject("since the change")
        case "breaks now":
            raise RuntimeError("since the change")
    return [output]


async def apply_many(messages: list[Message[Any]], db: Database) -> list[Output]:
    await db.execute(
        "INSERT INTO effects (what) SELECT * FROM unnest($1::text[])", [message.value["what"] for message in messages]
    )
    return [_output(message) for message in messages]


def _output(message: Message[Any]) -> Output:
    return Output(OUTPUT, {"what": message.value["what"]}, key=message.key, type="Applied", cause=message)


def _block(seconds: float) -> None:
    """As a client does that knows no asyncio."""
    time.sleep(seconds)


async def _swallow() -> None:
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(3600)


async def _exit() -> None:
    sys.exit(3)


def _is_down() -> bool:
    return DOWN.exists()
