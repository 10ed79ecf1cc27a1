"""A queued write that Postgres refuses, or that is cut off, costs no neighbour a row."""

from __future__ import annotations

import json

import pytest

from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Sent
from tests.support.scenes import THREE, in_one_batch, messages, statuses


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_refused_write_that_surfaces_in_a_neighbour_who_swallows_it_costs_nobody_a_row(
    bench: MakeBench, concurrency: int
) -> None:
    """In a batch that is sent carefully, because one before it had a refused write."""
    b = bench({"T": "queue", "R": "read_swallow_and_write", "G": "hold_up"}, retry=THREE, concurrency=concurrency)
    await b.execute("ALTER TABLE effects ADD UNIQUE (what), ADD CHECK (what <> 'bad')")
    await b.execute("INSERT INTO effects (what) VALUES ('taken')")
    async with b.running():
        b.send(messages("bad"))
        await b.done()
        assert len(b.engines[0]._loop._careful) == 1, "with the one statement that was refused"
        await in_one_batch(
            b,
            [
                *messages("m0", key=b"0"),
                Sent({"what": "taken"}, b"1", id="m1"),
                *messages("m2", key=b"2"),
                *messages("m3", key=b"3", type_="R"),
                *messages("m4", key=b"4"),
            ],
        )
        await b.done()
    assert sorted(await b.effects()) == ["m0", "m2", "m3", "m4", "taken"]
    assert await statuses(b) == {"bad": "failed", "m1": "failed"}
    row = (await b.inbox())["m1"]
    assert (row["attempts"], json.loads(row["error"])["class"]) == (3, "bug")


@pytest.mark.parametrize("careful", [False, True], ids=["at first", "carefully"])
async def test_flush_that_is_cut_off_by_an_impatient_reader_costs_nobody_a_row(bench: MakeBench, careful: bool) -> None:
    b = bench({"T": "queue", "R": "read_impatiently_and_write", "G": "hold_up"}, retry=THREE)
    await b.execute(
        "ALTER TABLE effects ADD CHECK (what <> 'bad')",
        """CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END $$""",
        "CREATE TRIGGER dawdle BEFORE INSERT ON effects FOR EACH ROW WHEN (NEW.what = 'm1') EXECUTE FUNCTION dawdle()",
    )
    async with b.running():
        if careful:
            b.send(messages("bad"))
            await b.done()
        await in_one_batch(b, [*messages("m0", "m1", "m2"), *messages("m3", type_="R"), *messages("m4")])
        await b.done()
    assert await b.effects() == ["m0", "m1", "m2", "m3", "m4"]
    assert await statuses(b) == ({"bad": "failed"} if careful else {})


async def test_who_fails_while_its_write_is_on_the_way_takes_it_back_all_the_same(bench: MakeBench) -> None:
    """A neighbour's read sends it, carefully, and Postgres has not answered yet."""
    b = bench(
        {"T": "queue", "Q": "queue_until_read", "R": "read_and_swallow"},
        retry={"attempts": 1},
        concurrency=4,
        batch={"max_messages": 1000, "linger_ms": 300},
    )
    await b.execute(
        "ALTER TABLE effects ADD CHECK (what <> 'bad')",
        """CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN PERFORM pg_sleep(1); RETURN NEW; END $$""",
        "CREATE TRIGGER dawdle BEFORE INSERT ON effects FOR EACH ROW WHEN (NEW.what = 'm1') EXECUTE FUNCTION dawdle()",
    )
    handlers.failing.add("m1")
    async with b.running():
        b.send(messages("bad"))
        await b.done()
        b.send([*messages("m0", key=b"0"), *messages("m1", key=b"1", type_="Q"), *messages("m2", key=b"2", type_="R")])
        on_the_way = "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
        await b.until(lambda: b.rows(on_the_way), "the write on its way")
        handlers.gate.set()
        await b.done()
    assert await b.effects() == ["m0"]
    assert await statuses(b) == {"bad": "failed", "m1": "failed"}
