"""Queued writes of keys that come again and again: few round trips, and the order of each key wherever it matters."""

from __future__ import annotations

import random
from typing import Any

import pytest

from processor import Database, Message
from tests.integration.conftest import MakeBench
from tests.support.bench import Bench, Sent
from tests.support.logs import events

BATCH = {"max_messages": 500, "linger_ms": 300}
KEYS = 40
TABLES = f"""
    CREATE TABLE purses (id integer PRIMARY KEY, balance bigint NOT NULL DEFAULT 0, history text NOT NULL DEFAULT '');
    CREATE TABLE payments (number bigserial PRIMARY KEY, account_id integer REFERENCES purses, n integer NOT NULL);
    INSERT INTO purses SELECT n FROM generate_series(0, {KEYS - 1}) AS n;
"""
BOOK = "INSERT INTO payments (account_id, n) VALUES ($1, $2)"
MOVE = "UPDATE purses SET balance = balance + $2 WHERE id = $1"
BOOK_MANY = "INSERT INTO payments (account_id, n) SELECT * FROM unnest($1::integer[], $2::integer[])"
MOVE_MANY = """
    UPDATE purses SET balance = balance + total
    FROM (SELECT id, sum(n) AS total FROM unnest($1::integer[], $2::integer[]) AS u(id, n) GROUP BY id) AS moved
    WHERE purses.id = moved.id
"""


def numbered(start: int, stop: int) -> list[Sent]:
    """In no order that repeats."""
    keys = random.Random(19)
    fed = [(n, keys.randrange(KEYS)) for n in range(stop)]
    return [Sent({"account": key, "n": n}, id=f"m{n}", key=f"k{key}".encode()) for n, key in fed[start:]]


async def write(message: Message[Any], db: Database) -> None:
    db.write(BOOK, message.value["account"], message.value["n"])
    db.write(MOVE, message.value["account"], message.value["n"])


async def collect(message: Message[Any], db: Database) -> None:
    db.collect(BOOK_MANY, message.value["account"], message.value["n"])
    db.collect(MOVE_MANY, message.value["account"], message.value["n"])


async def insert(message: Message[Any], db: Database) -> None:
    db.insert("payments", account_id=message.value["account"], n=message.value["n"])
    db.write(MOVE, message.value["account"], message.value["n"])


APPEND = "UPDATE purses SET history = history || ' ' || $2::text WHERE id = $1"
SEAL = "UPDATE purses SET history = '(' || history || ')' WHERE id = $1"


async def append_and_seal(message: Message[Any], db: Database) -> None:
    """Two statements on one table: what a row ends with tells in which order they ran."""
    db.write(APPEND, message.value["account"], str(message.value["n"]))
    db.write(SEAL, message.value["account"])


async def measured(bench: Bench, logs: list[Any]) -> list[dict[str, int]]:
    """The round trips of each batch of many messages when everything is known that can be."""
    async with bench.running():
        for start, stop in ((0, 1), (1, 400), (400, 800)):
            bench.send(numbered(start, stop))
            await bench.done()
        before = len(events(logs, "batch_committed"))
        bench.send(numbered(800, 2800))
        await bench.done()
    return [event["round_trips"] for event in events(logs, "batch_committed")[before:] if event["records"] > 200]


async def assert_right(bench: Bench) -> None:
    expected = [0] * KEYS
    for sent in numbered(0, 2800):
        expected[sent.value["account"]] += sent.value["n"]
    rows = await bench.rows(
        "SELECT balance, (SELECT sum(n) FROM payments WHERE account_id = id) AS booked FROM purses ORDER BY id"
    )
    assert [row["balance"] for row in rows] == [row["booked"] for row in rows] == expected


@pytest.mark.parametrize("handler", ["write", "collect", "insert"])
async def test_round_trips_do_not_grow_with_keys_that_repeat(bench: MakeBench, logs: list[Any], handler: str) -> None:
    """Although the tables are tied by a foreign key: an UPDATE of a balance changes no key."""
    b = bench(f"{__name__}:{handler}", batch=BATCH)
    await b.execute(TABLES)
    batches = await measured(b, logs)
    assert [trips["writes"] for trips in batches] == [2] * len(batches)
    assert len(batches) >= 4
    await assert_right(b)


async def test_statements_on_one_table_keep_the_order_of_each_key(bench: MakeBench, logs: list[Any]) -> None:
    b = bench(f"{__name__}:append_and_seal", batch=BATCH)
    await b.execute(TABLES)
    batches = await measured(b, logs)
    rows = await b.rows("SELECT id, history FROM purses ORDER BY id")
    for row in rows:
        expected = ""
        for sent in numbered(0, 2800):
            if sent.value["account"] == row["id"]:
                expected = f"({expected} {sent.value['n']})"
        assert row["history"] == expected
    # As often as the most frequent key of a batch comes, which is less than half of what all repeats would make.
    assert max(trips["writes"] for trips in batches) < 60


async def test_trigger_that_is_added_while_we_run_is_reckoned_with_after_the_first_error(
    bench: MakeBench, logs: list[Any]
) -> None:
    """Entries may now be booked only as long as their account has the balance of those before them."""
    b = bench(f"{__name__}:write", batch=BATCH)
    await b.execute(TABLES)
    async with b.running():
        for start, stop in ((0, 1), (1, 400), (400, 800)):
            b.send(numbered(start, stop))
            await b.done()
        assert events(logs, "batch_committed")[-1]["round_trips"]["writes"] == 2
        await b.execute(
            """CREATE FUNCTION in_step() RETURNS trigger LANGUAGE plpgsql AS $$
               BEGIN
                   IF (SELECT balance FROM purses WHERE id = NEW.account_id)
                       <> (SELECT sum(n) FROM payments WHERE account_id = NEW.account_id) - NEW.n
                   THEN RAISE EXCEPTION 'out of step' USING ERRCODE = '23514';
                   END IF;
                   RETURN NULL;
               END $$""",
            "CREATE TRIGGER in_step AFTER INSERT ON payments FOR EACH ROW EXECUTE FUNCTION in_step()",
        )
        b.send(numbered(800, 2800))
        await b.done()
    assert {row["status"] for row in (await b.inbox()).values()} == {"completed"}
    await assert_right(b)
