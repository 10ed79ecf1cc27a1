"""A rewind to what is forgotten is refused, one to what is remembered changes nothing."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import asyncpg
import pytest

from processor.errors import Halt
from processor.messages.message import Partition
from processor.postgres import retention
from processor.postgres.retention import Watermark
from tests.integration.conftest import MakeBench
from tests.integration.retention.conftest import age, age_notes, prune
from tests.support import command
from tests.support.bench import Bench, Sent
from tests.support.offsets import set_offset


def words(start: int, stop: int) -> list[str]:
    return [f"w{n}" for n in range(start, stop)]


async def process(bench: Bench, *numbers: int) -> None:
    bench.send([Sent({"what": f"w{n}"}, id=f"m{n}") for n in numbers])
    await bench.run_until_done()


async def connected(bench: Bench, work: Callable[[asyncpg.Connection], Awaitable[object]]) -> object:
    connection = await asyncpg.connect(bench.database)
    try:
        return await work(connection)
    finally:
        await connection.close()


@pytest.fixture
async def b(bench: MakeBench) -> Bench:
    """Forty messages; the first twenty-five are forgotten, and that was noted when the log ended behind them."""
    made = bench()
    await process(made, *range(25))
    await prune(made)
    await process(made, *range(25, 40))
    await age(made, 8, '"offset" < 25')
    await age_notes(made, 6.9)
    assert (await prune(made))["deleted"] == 25
    return made


async def test_rewind_below_the_watermark_is_refused_with_the_reason_and_the_range_that_is_safe(b: Bench) -> None:
    found = await connected(b, lambda connection: retention.watermarks(connection, b.consumer))
    assert found == {Partition(b.input, 0): Watermark(25)}
    set_offset(b, 10)
    with pytest.raises(
        Halt, match=r"moved back to 10, and messages below 25 are forgotten .*from 10 to 24 would .*to 25 or above"
    ):
        await b.run_until_done()
    assert await b.effects() == words(0, 40)
    assert b.committed() == {0: 10}, "the operator's offset stays as it is"


async def test_rewind_above_the_watermark_changes_nothing(b: Bench) -> None:
    for offset in (25, 30):
        set_offset(b, offset)
        await b.run_until_done()
        assert await b.effects() == words(0, 40)
        assert len(b.outputs()) == 40


async def test_rewind_above_the_watermark_finds_duplicates_of_what_lies_below_it(bench: MakeBench) -> None:
    """Their ids are remembered from when they came again, not from when they came first."""
    b = bench()
    await process(b, *range(10))
    await age(b, 3)
    await prune(b)
    await age(b, 2)
    await age_notes(b, 2)
    await process(b, 3, 4, 100)
    await age(b, 4)
    await age_notes(b, 4)
    assert (await prune(b))["deleted"] == 8
    set_offset(b, 10)
    await b.run_until_done()
    assert await b.effects() == [*words(0, 10), "w100"]


async def test_operator_s_word_lets_one_rewind_handle_again_what_was_forgotten(b: Bench) -> None:
    set_offset(b, 10)
    shown = await _accept(b, "--dry-run")
    assert shown["rewinds"] == [
        {"topic": b.input, "partition": 0, "offset": 10, "again_below": 25, "remembered_from": 25}
    ]
    with pytest.raises(Halt):
        await b.run_until_done()
    await _accept(b, "--yes")
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted([*words(0, 40), *words(10, 25)])
    assert (await _accept(b, "--dry-run"))["rewinds"] == []
    set_offset(b, 10)
    with pytest.raises(Halt, match="forgotten"):
        await b.run_until_done()


async def test_accepted_rewind_goes_on_after_a_death_in_the_middle(b: Bench) -> None:
    """The ledger has moved and the word is used up, but the offset is still the operator's."""
    set_offset(b, 10)
    await _accept(b, "--yes")
    killed = {"PROCESSOR_FAILPOINTS": "after_reposition=kill"}
    doomed = await asyncio.to_thread(command.processor, Path.cwd(), "run", str(b.config), environ=killed)
    assert doomed.returncode == -signal.SIGKILL, doomed
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted([*words(0, 40), *words(10, 25)])


async def test_below_the_watermark_after_an_accepted_rewind_an_offset_ahead_needs_no_other_word(b: Bench) -> None:
    await b.execute("UPDATE ledger SET next_offset = 10")
    set_offset(b, 20)
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted([*words(0, 40), *words(20, 25)])


async def test_operator_s_word_that_was_not_needed_lets_no_later_rewind_through(b: Bench) -> None:
    """The operator thought better of it, and moved the offset to where all is remembered."""
    set_offset(b, 10)
    await _accept(b, "--yes")
    set_offset(b, 30)
    await b.run_until_done()
    found = await connected(b, lambda connection: retention.watermarks(connection, b.consumer))
    assert found == {Partition(b.input, 0): Watermark(25)}


async def test_operator_s_word_is_withdrawn_when_more_has_been_forgotten_since(b: Bench) -> None:
    set_offset(b, 10)
    await _accept(b, "--yes")

    async def raised(connection: asyncpg.Connection) -> dict[Partition, Watermark]:
        async with connection.transaction():
            assert await retention.raise_watermarks(connection, b.consumer, await retention.now(connection))
        return await retention.watermarks(connection, b.consumer)

    assert await connected(b, raised) == {Partition(b.input, 0): Watermark(40)}


async def test_watermark_is_not_raised_over_a_rewind_that_the_service_has_followed_since(bench: MakeBench) -> None:
    b = bench()
    await process(b, *range(20))

    async def raised(connection: asyncpg.Connection) -> bool:
        now = await retention.now(connection)
        await retention.note_log_ends(
            connection,
            b.consumer,
            now,
            {row["partition_id"]: 20 for row in await b.rows("SELECT * FROM ledger")},
            timedelta(0),
        )
        async with connection.transaction():
            return await retention.raise_watermarks(connection, b.consumer, now)

    await b.execute("UPDATE ledger SET next_offset = 5")
    assert await connected(b, raised) is False
    await b.execute("UPDATE ledger SET next_offset = 20")
    assert await connected(b, raised) is True


@pytest.mark.parametrize("surveyed", [True, False])
async def test_rewind_and_forgetting_cannot_miss_each_other(bench: MakeBench, surveyed: bool) -> None:
    """The ledger follows a rewind only with the watermark's row locked, and the watermark is raised under that lock."""
    b = bench()
    await process(b, *range(20))
    (row,) = await b.rows("SELECT partition_id FROM ledger")
    one = await asyncpg.connect(b.database)
    other = await asyncpg.connect(b.database)
    try:
        now = await retention.now(one)
        if surveyed:
            await retention.note_log_ends(one, b.consumer, now, {row["partition_id"]: 20}, timedelta(0))
        async with one.transaction():
            assert await retention.may_move(one, row["partition_id"], 20, 5)

            async def forget() -> bool:
                await retention.note_log_ends(other, b.consumer, now, {row["partition_id"]: 20}, timedelta(0))
                async with other.transaction():
                    return await retention.raise_watermarks(other, b.consumer, now)

            forgetting = asyncio.create_task(forget())
            waits = "SELECT count(*) AS n FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'"
            while not (await b.rows(waits, other.get_server_pid()))[0]["n"]:
                assert not forgetting.done()
            await one.execute("UPDATE ledger SET next_offset = 5")
        assert await forgetting is False
        async with other.transaction():
            await other.execute("UPDATE ledger SET next_offset = 20")
            assert await retention.raise_watermarks(other, b.consumer, now)
        async with one.transaction():
            assert not await retention.may_move(one, row["partition_id"], 20, 5)
    finally:
        await one.close()
        await other.close()


async def _accept(bench: Bench, *arguments: str) -> dict[str, list[dict[str, object]]]:
    done = await command.processor_beside(Path.cwd(), "accept-rewind", str(bench.config), "-o", "json", *arguments)
    assert done.returncode == 0, done
    found: dict[str, list[dict[str, object]]] = json.loads(done.stdout)
    return found
