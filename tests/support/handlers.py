"""Handlers for tests of the engine: small, and failing on demand."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Iterator
from typing import Any

from pydantic import BaseModel, field_validator

from processor import Database, Message, Messages, Output, Outputs, Reject, Result, Retry, Unavailable

INSERT = "INSERT INTO effects (what) VALUES ($1)"

COLLECT = "INSERT INTO effects (what) SELECT * FROM unnest($1::text[])"

output_topic = ""
nowhere = "no-such-topic"
calls: Counter[str] = Counter()
failing: set[str] = set()
gate = asyncio.Event()
in_flight = 0
odd: Any = None  # what an exception has under the name of sqlstate
seen_in_flight: list[int] = []  # how many there were, at the beginning and the end of each
plans: dict[str, Iterator[BaseException]] = {}  # what `planned` raises for a message, call by call
moments: defaultdict[str, list[float]] = defaultdict(list)  # of the monotonic clock, when it was called
attempts: defaultdict[str, list[int]] = defaultdict(list)  # what messages said about themselves


class Odd(Exception):
    """One that a deployment may have a class for."""


class OddOfAKind(Odd):
    pass


def probe() -> None:
    """A test may put its own in here; called by handlers that say so."""


async def meet(messages: Messages[Any], db: Database) -> None:
    """A test may put its own in here; awaited by handlers of batches by the column before they do anything."""


def reset(topic: str) -> None:
    global output_topic, in_flight
    output_topic = topic
    in_flight = 0
    seen_in_flight.clear()
    calls.clear()
    failing.clear()
    plans.clear()
    moments.clear()
    attempts.clear()


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
    calls[message.id] += 1
    await db.execute(INSERT, _what(message))
    return Output(nowhere, {"what": _what(message)})


async def too_large(message: Message[Any], db: Database) -> Output:
    await db.execute(INSERT, _what(message))
    return Output(output_topic, "x" * 2_000_000)


async def divide(message: Message[Any], db: Database) -> Any:
    """What it gives is wrong where it is told to fail, and how is what the message says."""
    await db.execute(INSERT, _what(message))
    number = math.nan if message.id in failing else None
    match message.value["as"]:
        case "output":
            return Output(output_topic, {"number": number})
        case "result":
            return Result({"number": number})
        case _:
            return {"number": 1} if message.id in failing else None


async def divide_many(messages: Messages[Any], db: Database) -> Outputs:
    await db.execute(COLLECT, [_what(message) for message in messages])
    return Outputs(output_topic, [{"number": math.inf if id_ in failing else None} for id_ in messages.ids])


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


class Sayer(BaseModel):
    """Its validator quotes what it refuses, as a program sees it and no text encoding has it."""

    what: str

    @field_validator("what")
    @classmethod
    def _refuse(cls, what: str) -> str:
        if what in failing:
            raise FileNotFoundError(f"half a surrogate pair: {chr(0xD83D)}")
        return what


async def said(message: Message[Sayer], db: Database) -> Output:
    calls[message.id] += 1
    await db.execute(INSERT, message.value.what)
    return Output(output_topic, {"what": message.value.what}, key=message.key)


async def raise_odd_text(message: Message[Any], db: Database) -> None:
    """Its error holds text that has no encoding, and something else where others have a SQLSTATE."""
    if message.id in failing:
        error = OddOfAKind(f"half a surrogate pair: {chr(0xD83D)}")
        error.sqlstate = odd  # type: ignore[attr-defined]
        raise error
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


async def steps(message: Message[Any], db: Database) -> Result:
    """Whatever the message asks for, in its order; answers what its reads have seen."""
    calls[message.id] += 1
    seen = []
    for step, *arguments in message.value["steps"]:
        match step:
            case "write":
                db.write(INSERT, *arguments)
            case "append":
                db.write("UPDATE effects SET what = what || $1", *arguments)
            case "collect":
                db.collect(COLLECT, *arguments)
            case "insert":
                db.insert("effects", what=arguments[0])
            case "insert into":
                db.insert(arguments[0], **arguments[1])
            case "execute":
                await db.execute(INSERT, *arguments)
            case "read":
                rows = await db.fetch("SELECT what FROM effects ORDER BY id")
                seen.append([row["what"] for row in rows])
    return Result(seen)


async def upsert_many(messages: list[Message[Any]], db: Database) -> None:
    for message in messages:
        await upsert_and_delete(message, db)


async def delete_many(messages: list[Message[Any]], db: Database) -> None:
    for message in messages:
        await upsert_and_delete(message, db)


async def result_with_an_output_too_large(message: Message[Any], db: Database) -> Result:
    calls[message.id] += 1
    return Result({"kept": True}, [Output(output_topic, "x" * 2_000_000)])


@contextlib.asynccontextmanager
async def _in_flight() -> AsyncIterator[None]:
    global in_flight
    in_flight += 1
    seen_in_flight.append(in_flight)
    try:
        yield
    finally:
        seen_in_flight.append(in_flight)
        in_flight -= 1


async def lane(message: Message[Any], db: Database) -> Output:
    """Waits as for an answer of another service, writes, and fails where it is told to."""
    calls[message.id] += 1
    async with _in_flight():
        await asyncio.sleep(0.01)
    db.write(INSERT, _what(message))
    if message.id in failing:
        raise RuntimeError(f"told to fail on {message.id}")
    return Output(output_topic, {"what": _what(message)}, key=message.key)


async def uneven_lane(message: Message[Any], db: Database) -> list[Output]:
    """The earlier the message, the longer it waits: whoever does not care about order gets it wrong."""
    calls[message.id] += 1
    async with _in_flight():
        for _ in range(50 - int(message.offset) % 50):
            await asyncio.sleep(0)
        await db.execute(INSERT, _what(message))
        await asyncio.sleep(0)
    if message.id in failing:
        await db.execute("SELECT 1 / 0")
    return [Output(output_topic, {"what": f"{_what(message)}.{n}"}, key=message.key) for n in range(2)]


async def lane_later(message: Message[Any], db: Database) -> Output:
    """Asks to be tried again twice, from among others that are at work."""
    async with _in_flight():
        await asyncio.sleep(0)
    return await later(message, db)


async def slow_lane(message: Message[Any], db: Database) -> None:
    """Never ends; opens the gate when four are at it."""
    calls[message.id] += 1
    async with _in_flight():
        await db.execute(INSERT, _what(message))
        if in_flight >= 4:
            gate.set()
        try:
            await asyncio.sleep(3600)
        finally:
            with contextlib.suppress(Exception):
                await db.execute(INSERT, "after the end")


async def slow_at_first(message: Message[Any], db: Database) -> None:
    """The first message takes longer than a group waits for a member that does not poll."""
    probe()
    calls[message.id] += 1
    db.write(INSERT, message.id)
    if len(calls) == 1:
        for _ in range(25):
            await asyncio.sleep(0.1)
            probe()


async def never(message: Message[Any], db: Database) -> None:
    """Asks to be tried again for ever."""
    calls[message.id] += 1
    db.write(INSERT, _what(message))
    raise Retry("not yet", after=0.0)


async def queue_until_read(message: Message[Any], db: Database) -> None:
    """Queues, waits until a neighbour's read has sent it, and fails where it is told to."""
    calls[message.id] += 1
    db.write(INSERT, _what(message))
    with contextlib.suppress(TimeoutError):  # the neighbour may have come in another batch
        await asyncio.wait_for(gate.wait(), 2)
    if message.id in failing:
        raise RuntimeError(f"told to fail on {message.id}")


async def read_for_all(message: Message[Any], db: Database) -> None:
    calls[message.id] += 1
    with contextlib.suppress(Exception):
        await db.fetchval("SELECT 1")
    gate.set()


async def planned(message: Message[Any], db: Database) -> Output:
    """Queues one row, then raises what the test has planned for this call, if anything."""
    calls[message.id] += 1
    moments[message.id].append(time.monotonic())
    attempts[message.id].append(message.attempt)
    db.write(INSERT, _what(message))
    error = next(plans.get(message.id, iter(())), None)
    if error is not None:
        raise error
    return Output(output_topic, {"what": _what(message)}, key=message.key)


async def planned_many(messages: list[Message[Any]], db: Database) -> None:
    """The same for a batch: raises what is planned for any of its messages."""
    for message in messages:
        await planned(message, db)


async def planned_after_writing(message: Message[Any], db: Database) -> Output:
    """The same, but its row is in Postgres already when it raises: only a rollback takes it back."""
    await db.fetchval("SELECT 1")
    return await planned(message, db)


async def hang_at_first(message: Message[Any], db: Database) -> None:
    """Comes to no end when it is called for the first time."""
    calls[message.id] += 1
    db.write(INSERT, _what(message))
    if calls[message.id] == 1:
        await asyncio.sleep(3600)


async def raise_state(message: Message[Any], db: Database) -> None:
    """An error of Postgres' with the SQLSTATE that the message names, as often as it says."""
    calls[message.id] += 1
    db.write(INSERT, _what(message))
    if calls[message.id] <= message.value["times"]:
        await db.execute(f"DO $$ BEGIN RAISE 'as told' USING ERRCODE = '{message.value['state']}'; END $$")


async def reject_or_apply(message: Message[Any], db: Database) -> Output:
    """Told by what it says, not by its id."""
    what = _what(message)
    if what in failing:
        raise Reject(f"told to fail on {what}")
    await db.execute(INSERT, what)
    return Output(output_topic, {"what": what}, key=message.key)


async def hold_up(message: Message[Any], db: Database) -> None:
    """Keeps the engine busy until the gate opens."""
    calls[message.id] += 1
    await gate.wait()


async def read_swallow_and_write(message: Message[Any], db: Database) -> None:
    """Reads, whatever comes of it, and then queues a row of its own."""
    calls[message.id] += 1
    with contextlib.suppress(Exception):
        await db.fetch("SELECT 1")
    db.write(INSERT, _what(message))


async def read_impatiently_and_write(message: Message[Any], db: Database) -> None:
    """The same, but does not wait long for the answer."""
    calls[message.id] += 1
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(0.1):
            await db.fetch("SELECT 1")
    db.write(INSERT, _what(message))


async def stall(message: Message[Any], db: Database) -> None:
    """Raises what is planned; comes to no end where it is told to fail, and opens the gate to say so."""
    calls[message.id] += 1
    error = next(plans.get(message.id, iter(())), None)
    if error is not None:
        raise error
    db.write(INSERT, _what(message))
    if message.id in failing:
        gate.set()
        await asyncio.sleep(3600)


async def down_at_first(message: Message[Any], db: Database) -> None:
    """Finds what it needs down when it is called for the first time, and waits for the gate after that."""
    calls[message.id] += 1
    if calls[message.id] == 1:
        raise Unavailable("down", after=0.0)
    await gate.wait()
    db.write(INSERT, _what(message))


async def by_column(messages: Messages[Any], db: Database) -> Outputs:
    """Writes a row and sends an output for each without looking at any by itself; fails where it is told to."""
    calls.update(messages.ids)
    await meet(messages, db)
    whats = [str(value["what"]) for value in messages.values]
    await db.execute(COLLECT, whats)
    bad = failing.intersection(messages.ids)
    if bad:
        raise RuntimeError(f"told to fail on {sorted(bad)}")
    return Outputs(output_topic, [{"what": what} for what in whats], messages.keys, "Applied")


async def say_how_many(message: Message[Any], db: Database) -> Output:
    """How many rows there were before its own."""
    calls[message.id] += 1
    before = await db.fetchval("SELECT count(*) FROM effects")
    db.write(INSERT, _what(message))
    return Output(output_topic, {"before": before}, key=message.key)


async def by_column_with_cause(messages: Messages[Any], db: Database) -> list[Output]:
    """Takes columns and messages, and answers every other message, twice, in any order."""
    calls.update(messages.ids)
    await meet(messages, db)
    assert [message.id for message in messages] == messages.ids
    assert [messages[index].value for index in range(len(messages))] == messages.values
    assert [message.key for message in messages[:]] == messages.keys
    await db.execute(COLLECT, [_what(message) for message in messages])
    return [
        Output(output_topic, {"what": f"{_what(message)}.{n}"}, message.key, {"n": str(n)}, cause=message)
        for n in range(2)
        for message in reversed(messages)
        if message.offset % 2 == 0
    ]


async def uneven_outputs(messages: Messages[Any], db: Database) -> Outputs:
    """One output too many, after all rows were written."""
    calls.update(messages.ids)
    await meet(messages, db)
    await db.execute(COLLECT, [str(value["what"]) for value in messages.values])
    return Outputs(output_topic, [*messages.values, {"what": "one too many"}])


async def ask(message: Message[Any], db: Database) -> None:
    """Its text is a question; the row has the answer."""
    db.write(INSERT, str(await db.fetchval(_what(message))))


async def keep_nothing(message: Message[Any], db: Database) -> None:
    """Needs no table."""


async def keep_books(message: Message[Any], db: Database) -> None:
    """By every way there is, into a table of the team's own that is called like one of ours."""
    what = _what(message)
    await db.execute("INSERT INTO ledger (what) VALUES ($1)", what)
    db.write("UPDATE ledger SET written = written + 1 WHERE what = $1", what)
    db.collect("INSERT INTO inbox (what) SELECT * FROM unnest($1::text[])", what)
    db.insert("unsent", what=what)
    assert await db.fetchval("SELECT count(*) FROM ledger WHERE what = $1", what) == 1
