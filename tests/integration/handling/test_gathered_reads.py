"""Reads of handlers that run at the same time go out together, and no handler can tell."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

import asyncpg
import pytest

from processor import Database, Message, Result
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.handlers import INSERT
from tests.support.logs import events

FULL_BATCH = {"max_messages": 1000, "linger_ms": 300}
LANES = 16
COUNTERS = "CREATE TABLE counters (name text PRIMARY KEY, count integer NOT NULL, history text NOT NULL)"
READ = "SELECT count, history FROM counters WHERE name = $1 FOR UPDATE"
SET = """
    INSERT INTO counters VALUES ($1, $2, $3)
    ON CONFLICT (name) DO UPDATE SET count = excluded.count, history = excluded.history
"""


def numbered(count: int, keys: int | None = None, **value: Any) -> list[Sent]:
    return [
        Sent({"what": f"w{n}", "n": n, **value}, id=f"m{n}", key=f"k{n % (keys or count)}".encode())
        for n in range(count)
    ]


async def results(bench: Bench) -> dict[str, Any]:
    return {name: row["result"] and json.loads(row["result"]) for name, row in (await bench.inbox()).items()}


async def failed(bench: Bench) -> dict[str, str]:
    rows = await bench.inbox()
    return {name: json.loads(row["error"])["message"] for name, row in rows.items() if row["status"] == "failed"}


async def count_by(name: str, message: Message[Any], db: Database) -> None:
    """Read, decide, write: right only if each handler sees what those before it have written."""
    row = await db.fetchrow(READ, name)
    count, history = row or (0, "")
    db.write(SET, name, count + 1, f"{history} {message.value['n']}")


async def count_own_key(message: Message[Any], db: Database) -> None:
    assert message.key is not None
    await count_by(message.key.decode(), message, db)


async def count_all(message: Message[Any], db: Database) -> None:
    await count_by("all", message, db)


async def count_all_in_tasks(message: Message[Any], db: Database) -> None:
    """The read is in a task of its own, and the handler goes on later than its answer comes."""
    row = await asyncio.wait_for(db.fetchrow(READ, "all"), 30)
    count, history = row or (0, "")
    db.write(SET, "all", count + 1, f"{history} {message.value['n']}")


async def test_each_key_reads_what_it_has_written_in_the_order_of_the_topic(bench: MakeBench) -> None:
    b = bench(f"{__name__}:count_own_key", concurrency=LANES, batch=FULL_BATCH)
    await b.execute(COUNTERS)
    b.send(numbered(500, 40))
    await b.run_until_done()
    rows = await b.rows("SELECT * FROM counters ORDER BY name")
    assert [(row["name"], row["count"]) for row in rows] == sorted((f"k{n}", len(range(n, 500, 40))) for n in range(40))
    for row in rows:
        assert row["history"].split() == [str(n) for n in range(int(row["name"][1:]), 500, 40)]


@pytest.mark.parametrize("handler", [count_all, count_all_in_tasks])
async def test_same_row_read_by_several_is_read_by_one_after_the_other(bench: MakeBench, handler: Any) -> None:
    b = bench(f"{__name__}:{handler.__name__}", concurrency=LANES, batch=FULL_BATCH)
    await b.execute(COUNTERS)
    b.send(numbered(200))
    await b.run_until_done()
    (row,) = await b.rows("SELECT count, history FROM counters")
    assert row["count"] == 200
    assert sorted(map(int, row["history"].split())) == list(range(200))


async def test_reads_of_many_handlers_make_one_round_trip(bench: MakeBench, logs: list[Any]) -> None:
    b = bench(f"{__name__}:count_own_key", concurrency=LANES, batch=FULL_BATCH)
    await b.execute(COUNTERS)
    async with b.running():
        b.send(numbered(2 * LANES))
        await b.done()
        before = len(events(logs, "batch_committed"))
        b.send(Sent({"n": n}, id=f"later{n}", key=f"k{n}".encode()) for n in range(800))
        await b.done()
    batches = events(logs, "batch_committed")[before:]
    assert sum(event["records"] for event in batches) == 800
    for event in batches:
        rounds = -(-event["records"] // LANES)
        assert event["round_trips"]["handlers"] <= rounds + 1
        assert event["round_trips"]["writes"] <= rounds + 1


MANY = "SELECT n, NULLIF(n, 2) AS odd, $1 || n AS text FROM generate_series(1, $2::integer) AS n"


async def read_all_kinds(message: Message[Any], db: Database) -> Result:
    n = message.value["n"]
    rows = await db.fetch(MANY, f"m{n}-", n % 5)
    row = await db.fetchrow(MANY, f"m{n}-", n % 3)
    value = await db.fetchval("SELECT NULLIF($1::bigint, 7)", n)
    pairs = await db.fetchrow("VALUES ($1::integer, 'x'), (0, NULL) -- the first one", n)
    same_names = await db.fetch("SELECT $1::integer AS a, 2 AS a;", n)
    assert pairs is not None
    for found in (*rows, pairs):
        assert isinstance(found, asyncpg.Record)
        assert len(found) == len(tuple(found)) == len(list(found.keys())) == len(found[:])
        assert [*found.items()] == [*zip(found.keys(), found.values(), strict=True)]
    if row is not None:
        values: Any = (row["n"], row["odd"], row["text"])
        assert row == values
        assert tuple(row) == values
        assert repr(row) == f"<Record n=1 odd=1 text='m{n}-1'>"
        assert "number of the call" not in row
        assert row.get("number of the call") is None
        with pytest.raises(IndexError):
            row[3]
    return Result(
        [[dict(found) for found in rows], row and dict(row), value, list(pairs), [list(s) for s in same_names]]
    )


async def test_every_kind_of_read_answers_as_if_it_had_been_alone(bench: MakeBench) -> None:
    b = bench(f"{__name__}:read_all_kinds", concurrency=LANES, batch=FULL_BATCH)
    b.send(numbered(100))
    await b.run_until_done()
    for name, (many, first, value, pair, same) in (await results(b)).items():
        n = int(name[1:])
        expected = [{"n": i, "odd": None if i == 2 else i, "text": f"m{n}-{i}"} for i in range(1, 6)]
        assert many == expected[: n % 5]
        assert first == (expected[0] if n % 3 else None)
        assert (value, pair, same) == (None if n == 7 else n, [n, "x"], [[n, 2]])


async def divide(message: Message[Any], db: Database) -> None:
    await db.fetchval("SELECT 100 / $1::integer", message.value["n"] - 40)
    db.write(INSERT, message.value["what"])


async def divide_and_swallow(message: Message[Any], db: Database) -> None:
    with contextlib.suppress(asyncpg.PostgresError):
        await db.fetchval("SELECT 100 / $1::integer", message.value["n"] - 40)
    db.write(INSERT, message.value["what"])


async def divide_text(message: Message[Any], db: Database) -> None:
    n = message.value["n"]
    await db.fetchval("SELECT 100 / $1::integer", "no number" if n == 40 else n + 1)
    db.write(INSERT, message.value["what"])


@pytest.mark.parametrize("handler", ["divide", "divide_and_swallow", "divide_text"])
async def test_error_in_a_read_fails_its_message_and_no_other(bench: MakeBench, handler: str) -> None:
    b = bench(f"{__name__}:{handler}", concurrency=LANES, batch=FULL_BATCH, retry={"attempts": 1})
    b.send(numbered(120))
    await b.run_until_done()
    assert set(await failed(b)) == {"m40"}
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(120) if n != 40)


async def misspell(message: Message[Any], db: Database) -> None:
    if message.value["n"] % 10 == 3:
        await db.fetchval("SELECT no_such_column FROM effects WHERE what = $1", message.id)
    await db.fetchval("SELECT count(*) FROM effects WHERE what = $1", message.id)
    db.write(INSERT, message.value["what"])


async def test_read_that_postgres_does_not_understand_fails_those_that_make_it(bench: MakeBench) -> None:
    b = bench(f"{__name__}:misspell", concurrency=LANES, batch=FULL_BATCH, retry={"attempts": 1})
    b.send(numbered(40))
    await b.run_until_done()
    assert set(await failed(b)) == {f"m{n}" for n in range(3, 40, 10)}
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(40) if n % 10 != 3)


async def change_by_reading(message: Message[Any], db: Database) -> Result:
    what = message.value["what"]
    inserted = await db.fetchval("INSERT INTO effects (what) VALUES ($1) RETURNING what", what)
    changed = await db.fetchrow(
        "WITH changed AS (UPDATE effects SET what = what || '+' WHERE what = $1 RETURNING what) SELECT * FROM changed",
        what,
    )
    assert changed is not None
    return Result([inserted, changed["what"]])


async def test_statement_that_cannot_be_part_of_another_is_sent_alone(bench: MakeBench) -> None:
    b = bench(f"{__name__}:change_by_reading", concurrency=LANES, batch=FULL_BATCH)
    b.send(numbered(100))
    await b.run_until_done()
    assert await results(b) == {f"m{n}": [f"w{n}", f"w{n}+"] for n in range(100)}
    assert sorted(await b.effects()) == sorted(f"w{n}+" for n in range(100))


async def slow_for_one(message: Message[Any], db: Database) -> None:
    handlers.calls[message.id] += 1
    await db.fetchval(
        "SELECT pg_sleep($1) FROM (VALUES ($2::text)) AS v", 60.0 if message.id == "m5" else 0.0, message.id
    )
    db.write(INSERT, message.value["what"])


async def test_read_that_takes_too_long_fails_its_message_alone(bench: MakeBench) -> None:
    b = bench(
        {"T": {"call": f"{__name__}:slow_for_one", "timeout_ms": 500}},
        concurrency=4,
        batch=FULL_BATCH,
        retry={"attempts": 1},
    )
    b.send(numbered(12))
    await b.run_until_done()
    assert set(await failed(b)) == {"m5"}
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(12) if n != 5)


async def impatient(message: Message[Any], db: Database) -> None:
    n = message.value["n"]
    seconds = 60.0 if n == 5 else 0.0
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(db.fetchval("SELECT pg_sleep($1) FROM (VALUES ($2::text)) AS v", seconds, message.id), 2)
    db.write(INSERT, message.value["what"])


async def test_handler_that_gives_up_on_a_read_and_goes_on_fails_alone(bench: MakeBench) -> None:
    b = bench(f"{__name__}:impatient", concurrency=8, batch=FULL_BATCH, retry={"attempts": 1})
    b.send(numbered(20))
    await b.run_until_done()
    assert set(await failed(b)) == {"m5"}
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(20) if n != 5)


async def read_and_wait(message: Message[Any], db: Database) -> None:
    handlers.in_flight += 1
    if handlers.in_flight == LANES:
        handlers.gate.set()
    await db.fetchval("SELECT pg_sleep(3600) FROM (VALUES ($1::text)) AS v", message.id)


async def test_stop_in_the_middle_of_a_read_leaves_nothing_behind(bench: MakeBench) -> None:
    b = bench(f"{__name__}:read_and_wait", concurrency=LANES, batch=FULL_BATCH)
    b.send(numbered(40))
    with pytest.raises(asyncio.CancelledError):
        await cancelled_in_the_handlers(b)
    assert await b.inbox() == {}
    assert {task for task in asyncio.all_tasks() if "_send_all" in repr(task.get_coro())} == set()


async def cancelled_in_the_handlers(bench: Bench) -> None:
    async with bench.running():
        await handlers.gate.wait()
        bench.tasks[0].cancel()


async def read_and_write(message: Message[Any], db: Database) -> None:
    await db.fetchval("SELECT what FROM effects WHERE what = $1", message.id)
    db.write(INSERT, "refused" if message.id == "m9" else message.value["what"])


async def test_refused_write_that_a_gathered_read_has_sent_fails_its_message_alone(bench: MakeBench) -> None:
    b = bench(f"{__name__}:read_and_write", concurrency=LANES, batch=FULL_BATCH)
    await b.execute("ALTER TABLE effects ADD CHECK (what <> 'refused')")
    b.send(numbered(60))
    await b.run_until_done()
    assert set(await failed(b)) == {"m9"}
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(60) if n != 9)
