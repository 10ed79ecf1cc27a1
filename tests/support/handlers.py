"""Handlers for tests of the engine: small, and failing on demand."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from typing import Any

from processor import Database, Message, Output, Reject, Result, Retry

INSERT = "INSERT INTO effects (what) VALUES ($1)"

output_topic = ""
calls: Counter[str] = Counter()
failing: set[str] = set()
gate = asyncio.Event()


def reset(topic: str) -> None:
    global output_topic
    output_topic = topic
    calls.clear()
    failing.clear()


def _what(message: Message[Any]) -> str:
    return str(message.value["what"]) if isinstance(message.value, dict) else message.id


async def apply(message: Message[Any], db: Database) -> Output:
    """Writes one row and sends one output; fails after writing where it is told to."""
    calls[message.id] += 1
    await db.execute(INSERT, _what(message))
    if message.id in failing:
        raise RuntimeError(f"told to fail on {message.id}")
    return Output(output_topic, {"what": _what(message)}, key=message.key, type="Applied")


async def queue(message: Message[Any], db: Database) -> None:
    """Only queues; the text may break a constraint when it is flushed."""
    calls[message.id] += 1
    db.write(INSERT, _what(message))


async def queue_and_reject(message: Message[Any], db: Database) -> None:
    calls[message.id] += 1
    db.write(INSERT, _what(message))
    raise Reject("never mind")


async def apply_many(messages: list[Message[Any]], db: Database) -> list[Output]:
    for message in messages:
        calls[message.id] += 1
    await db.execute("INSERT INTO effects (what) SELECT * FROM unnest($1::text[])", [_what(m) for m in messages])
    bad = [message.id for message in messages if message.id in failing]
    if bad:
        raise RuntimeError(f"told to fail on {bad}")
    return [Output(output_topic, {"what": _what(message)}, cause=message) for message in messages]


async def many_without_cause(messages: list[Message[Any]], db: Database) -> list[Output]:
    return [Output(output_topic, {"what": "?"}) for _ in messages]


async def answer(message: Message[Any], db: Database) -> Result:
    calls[message.id] += 1
    await db.execute(INSERT, _what(message))
    return Result({"answer": calls[message.id]}, [Output(output_topic, {"answer": calls[message.id]})])


async def flaky(message: Message[Any], db: Database) -> Output:
    calls[message.id] += 1
    await db.execute(INSERT, _what(message))
    if random.random() < 0.2:
        raise RuntimeError("one of the twenty per cent")
    return Output(output_topic, {"what": _what(message)})


async def later(message: Message[Any], db: Database) -> Output:
    """Asks to be tried again twice."""
    calls[message.id] += 1
    db.write(INSERT, _what(message))
    if message.id in failing and calls[message.id] <= 2:
        raise Retry("not yet", after=0.01)
    return Output(output_topic, {"what": _what(message)})


async def commit(message: Message[Any], db: Database) -> None:
    await db.execute(INSERT, "before")
    await db.execute(_what(message))


async def swallow(message: Message[Any], db: Database) -> None:
    """Breaks the transaction and says nothing."""
    calls[message.id] += 1
    if message.id in failing:
        try:
            await db.execute("SELECT 1 / 0")
        except Exception:
            return
    await db.execute(INSERT, _what(message))


async def to_nowhere(message: Message[Any], db: Database) -> Output:
    await db.execute(INSERT, _what(message))
    return Output("no-such-topic", {})


async def too_large(message: Message[Any], db: Database) -> Output:
    await db.execute(INSERT, _what(message))
    return Output(output_topic, "x" * 2_000_000)


async def upsert_and_delete(message: Message[Any], db: Database) -> None:
    """Two statements whose order decides the end result, as a change feed has them."""
    if message.value["what"] == "delete":
        db.write("DELETE FROM latest WHERE key = $1", message.key)
    else:
        db.write(
            "INSERT INTO latest VALUES ($1, $2) ON CONFLICT (key) DO UPDATE SET what = excluded.what",
            message.key,
            message.value["what"],
        )


async def raw(message: Message[bytes | None], db: Database) -> None:
    await db.execute(INSERT, repr((message.key, message.value)))


async def concurrent_reads(message: Message[Any], db: Database) -> None:
    found = await asyncio.gather(*(db.fetchval("SELECT $1::integer", n) for n in range(5)))
    await db.execute(INSERT, str(found))


async def slow(message: Message[Any], db: Database) -> None:
    calls[message.id] += 1
    await db.execute(INSERT, _what(message))
    gate.set()
    await asyncio.sleep(3600)


async def shaped(message: Message[dict[str, Any]], db: Database) -> None:
    await db.execute(INSERT, _what(message))


async def fails_first(message: Message[Any], db: Database) -> None:
    """Its first call for message m only queues and then fails."""
    calls[message.id] += 1
    db.write(INSERT, _what(message))
    if message.id == "m" and calls["m"] == 1:
        raise RuntimeError("the first time never works")


async def queue_odd(message: Message[Any], db: Database) -> None:
    """Queues an argument of the wrong type, which asyncpg refuses without asking Postgres."""
    calls[message.id] += 1
    db.write(INSERT, 5 if message.id in failing else _what(message))


async def read_and_swallow(message: Message[Any], db: Database) -> None:
    calls[message.id] += 1
    with contextlib.suppress(Exception):
        await db.fetchval("SELECT 1")


async def wait_a_little(message: Message[Any], db: Database) -> None:
    calls[message.id] += 1
    db.write(INSERT, _what(message))
    await asyncio.sleep(0.1)


async def slow_statement(message: Message[Any], db: Database) -> None:
    """Too slow for its time-out the first time."""
    calls[message.id] += 1
    await db.fetchval("SELECT pg_sleep($1)", 5.0 if calls[message.id] == 1 else 0.0)
    await db.execute(INSERT, _what(message))


async def cancelled(message: Message[Any], db: Database) -> None:
    await db.execute(INSERT, _what(message))
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


async def rejected(message: Message[Any], db: Database) -> None:
    raise Reject("as told")
