"""`concurrency`: handlers that wait do so together, and nobody can tell from the result."""

from __future__ import annotations

import asyncio
import json
from statistics import fmean

import pytest

from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent

FULL_BATCH = {"max_messages": 1000, "linger_ms": 300}
LANES = 64


def numbered(count: int, keys: int | None = None) -> list[Sent]:
    return [
        Sent({"what": f"w{n}"}, id=f"m{n}", key=None if keys is None else f"k{n % keys}".encode()) for n in range(count)
    ]


def said(bench: Bench) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs()]


async def failed(bench: Bench) -> set[str]:
    return {name for name, row in (await bench.inbox()).items() if row["status"] == "failed"}


@pytest.mark.parametrize("keys", [3000, None], ids=["a key each", "no keys"])
async def test_handlers_wait_together_in_as_many_lanes_as_there_are(bench: MakeBench, keys: int | None) -> None:
    """By Little's law the mean number in flight is the rate times the wait, and so the gain over one at a time."""
    b = bench("lane", concurrency=LANES, batch=FULL_BATCH)
    b.send(numbered(3000, keys))
    await b.run_until_done()
    assert max(handlers.seen_in_flight) == LANES
    assert fmean(handlers.seen_in_flight) >= 40
    assert set(handlers.calls.values()) == {1}
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(3000))
    assert said(b) == [f"w{n}" for n in range(3000)]


async def test_without_concurrency_one_waits_after_another(bench: MakeBench) -> None:
    b = bench("lane", batch=FULL_BATCH)
    b.send(numbered(30, 30))
    await b.run_until_done()
    assert max(handlers.seen_in_flight) == 1
    assert said(b) == await b.effects() == [f"w{n}" for n in range(30)]


async def test_messages_of_one_key_are_never_in_flight_together(bench: MakeBench) -> None:
    b = bench("lane", concurrency=LANES, batch=FULL_BATCH)
    b.send(numbered(60, 1))
    await b.run_until_done()
    assert max(handlers.seen_in_flight) == 1
    assert said(b) == await b.effects() == [f"w{n}" for n in range(60)]


async def test_each_key_is_applied_in_order_and_each_partition_answered_in_order(bench: MakeBench) -> None:
    b = bench("uneven_lane", partitions=2, concurrency=LANES, batch=FULL_BATCH)
    count, keys = 400, 23
    for partition in (0, 1):
        b.send(
            Sent(
                {"what": f"p{partition}-{n}"}, id=f"p{partition}-{n}", key=f"k{n % keys}".encode(), partition=partition
            )
            for n in range(count)
        )
    await b.run_until_done()
    assert max(handlers.seen_in_flight) > 10
    effects = await b.effects()
    assert len(effects) == 2 * count
    assert effects != sorted(effects, key=lambda what: int(what.partition("-")[2])), "nothing was done out of order"
    answers = said(b)
    for partition in (0, 1):
        for key in range(keys):
            of_key = [f"p{partition}-{n}" for n in range(key, count, keys)]
            assert [what for what in effects if what in set(of_key)] == of_key
        expected = [f"p{partition}-{n}.{place}" for n in range(count) for place in (0, 1)]
        assert [what for what in answers if what.startswith(f"p{partition}")] == expected


async def test_failing_message_fails_alone_and_costs_nobody_a_second_run(bench: MakeBench) -> None:
    b = bench("lane", concurrency=LANES, batch=FULL_BATCH)
    handlers.failing |= {"m3", "m90", "m91", "m199"}
    b.send(numbered(200, 50))
    await b.run_until_done()
    expected = [f"w{n}" for n in range(200) if f"m{n}" not in handlers.failing]
    assert sorted(await b.effects()) == sorted(expected)
    assert said(b) == expected
    assert await failed(b) == handlers.failing
    assert set(handlers.calls.values()) == {1}, "what it had only queued was withdrawn"


async def test_sql_error_in_a_lane_is_blamed_on_the_message_that_made_it(bench: MakeBench) -> None:
    b = bench("uneven_lane", concurrency=LANES, batch=FULL_BATCH)
    handlers.failing |= {"m5", "m50", "m51", "m149"}
    b.send(numbered(150, 40))
    await b.run_until_done()
    good = [n for n in range(150) if f"m{n}" not in handlers.failing]
    effects = await b.effects()
    assert sorted(effects) == sorted(f"w{n}" for n in good)
    for key in range(40):
        of_key = [f"w{n}" for n in good if n % 40 == key]
        assert [what for what in effects if what in set(of_key)] == of_key
    assert said(b) == [f"w{n}.{place}" for n in good for place in (0, 1)]
    assert await failed(b) == handlers.failing
    for name in handlers.failing:
        error = json.loads((await b.inbox())[name]["error"])
        assert "division by zero (SQLSTATE 22012)" in error["message"]


async def test_queued_write_that_fails_is_traced_through_the_lanes(bench: MakeBench) -> None:
    b = bench("lane", concurrency=LANES, batch=FULL_BATCH)
    await b.execute("ALTER TABLE effects ADD CHECK (what NOT IN ('w7', 'w140'))")
    b.send(numbered(150, 150))
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(150) if n not in (7, 140))
    assert await failed(b) == {"m7", "m140"}


@pytest.mark.parametrize("refused", ["", "w4"], ids=["fails after it was sent", "refused when it was sent"])
async def test_write_that_a_neighbour_s_read_has_sent_goes_with_its_message(bench: MakeBench, refused: str) -> None:
    b = bench({"Q": "queue_until_read", "R": "read_for_all"}, concurrency=LANES, batch=FULL_BATCH)
    await b.execute(f"ALTER TABLE effects ADD CHECK (what <> '{refused}')")
    if not refused:
        handlers.failing.add("m4")
    b.send(Sent({"what": f"w{n}"}, key=None, type="R" if n == 9 else "Q", id=f"m{n}") for n in range(20))
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(20) if n not in (4, 9))
    assert await failed(b) == {"m4"}


async def test_retry_in_a_lane_is_tried_again_and_everything_else_is_done_once(bench: MakeBench) -> None:
    b = bench("lane_later", concurrency=LANES, batch=FULL_BATCH, retry={"attempts": 9})
    handlers.failing |= {"m20", "m71"}
    b.send(numbered(100, 30))
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(100))
    assert said(b) == [f"w{n}" for n in range(100)]
    assert await failed(b) == set()
    assert {name: handlers.calls[name] >= 3 for name in handlers.failing} == {"m20": True, "m71": True}


async def test_retry_that_never_succeeds_fails_alone(bench: MakeBench) -> None:
    b = bench({"T": "lane", "L": "never"}, concurrency=LANES, batch=FULL_BATCH, retry={"attempts": 3})
    b.send([*numbered(20, 20), Sent({"what": "never"}, id="never", key=b"n", type="L"), *numbered(21, 21)[20:]])
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(21))
    assert await failed(b) == {"never"}


async def test_same_message_twice_among_the_lanes_is_done_once(bench: MakeBench) -> None:
    b = bench("lane", concurrency=LANES, batch=FULL_BATCH)
    b.send([*numbered(100, 20), *numbered(100, 20)])
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(100))
    assert said(b) == [f"w{n}" for n in range(100)]


async def test_batch_handlers_and_lanes_keep_to_the_order_of_the_topic(bench: MakeBench) -> None:
    b = bench({"T": "uneven_lane", "B": "apply_many"}, concurrency=LANES, batch=FULL_BATCH)
    b.send(
        Sent({"what": f"w{n}"}, id=f"m{n}", key=f"k{n % 11}".encode(), type="B" if n // 10 % 2 else "T")
        for n in range(100)
    )
    await b.run_until_done()
    effects = await b.effects()
    for key in range(11):
        of_key = [f"w{n}" for n in range(key, 100, 11)]
        assert [what for what in effects if what in set(of_key)] == of_key
    assert [what.partition(".")[0] for what in said(b) if not what.endswith(".1")] == [f"w{n}" for n in range(100)]


async def test_stop_in_the_middle_of_all_lanes_leaves_nothing_half_done(bench: MakeBench) -> None:
    b = bench("slow_lane", concurrency=8, batch=FULL_BATCH)
    b.send(numbered(20, 20))
    with pytest.raises(asyncio.CancelledError):
        await _cancelled_in_the_handlers(b)
    assert handlers.in_flight == 0, "every handler was ended"
    assert await b.effects() == []
    assert await b.inbox() == {}
    assert b.committed() in ({}, {0: 0})


async def _cancelled_in_the_handlers(bench: Bench) -> None:
    async with bench.running():
        await handlers.gate.wait()
        bench.tasks[0].cancel()
