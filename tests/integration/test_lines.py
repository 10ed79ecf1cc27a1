"""Several lines of batches in one process: each has partitions of its own, and none is in another one's way."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from processor import Database, Messages, Reject
from processor.consumer import Share
from processor.engine import Engine
from processor.errors import BatchAborted, Halt
from processor.inbox import COPY_FROM
from processor.loop import Line
from tests.integration.conftest import MakeBench
from tests.support import handlers, sql
from tests.support.bench import Bench, Sent
from tests.support.logs import events

PARTITIONS = 4
SIZE = COPY_FROM  # of a batch: the smallest that is claimed ahead
EACH = 5 * SIZE  # records of each partition
LINES = {"max_messages": SIZE, "in_flight": 2}


def records(partition: int, count: int = EACH, first: int = 0) -> list[Sent]:
    return [
        Sent({"what": f"{partition}.{n}"}, f"k{n % 7}".encode(), id=f"{partition}.{n}", partition=partition)
        for n in range(first, first + count)
    ]


def everything() -> list[Sent]:
    return [record for partition in range(PARTITIONS) for record in records(partition)]


async def assigned(bench: Bench) -> Engine:
    (engine,) = bench.engines
    await bench.until(lambda: len(engine._source.fetching()) == bench.partitions, "all partitions are read")
    return engine


def partitions_of(share: Share) -> set[int]:
    return {assignment.partition.number for assignment in share.owned()}


def line_of(engine: Engine, partition: int) -> Line:
    (line,) = (line for line in engine._lines if partition in partitions_of(line._share))
    return line


def partition_of(messages: Messages[Any]) -> set[int]:
    return {int(id_.split(".")[0]) for id_ in messages.ids}


async def all_done_once_and_in_order(bench: Bench, whats: list[str]) -> None:
    effects = await bench.effects()
    said = [value["what"] for _, value, _ in bench.outputs()]
    assert Counter(effects) == Counter(said) == Counter(whats)
    for partition in range(bench.partitions):
        own = [what for what in whats if what.startswith(f"{partition}.")]
        assert [what for what in effects if what in set(own)] == own
        assert [what for what in said if what in set(own)] == own


WHATS = [f"{partition}.{n}" for partition in range(PARTITIONS) for n in range(EACH)]


async def test_lines_divide_the_partitions_and_everything_is_done_once(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("by_column", partitions=PARTITIONS, batch=LINES)
    with_handlers: list[int] = []  # how many batches were, at the beginning and the end of each
    batches: list[set[int]] = []
    now = 0

    async def meet(messages: Messages[Any], db: Database) -> None:
        nonlocal now
        now += 1
        with_handlers.append(now)
        batches.append(partition_of(messages))
        await db.execute("SELECT pg_sleep(0.002)")
        with_handlers.append(now)
        now -= 1

    monkeypatch.setattr(handlers, "meet", meet)
    b.send(everything())
    async with b.running():
        engine = await assigned(b)
        shares = [partitions_of(line._share) for line in engine._lines]
        await b.done()
    assert sorted(map(len, shares)) == [2, 2]
    assert shares[0] | shares[1] == set(range(PARTITIONS))
    assert all(batch <= shares[0] or batch <= shares[1] for batch in batches), "none has partitions of both"
    assert set(with_handlers) == {1}, "handlers have the process to themselves"
    await all_done_once_and_in_order(b, WHATS)
    assert {event["transactional_id"] for event in events(logs, "producer_ready")} == {
        f"{b.consumer}-0",
        f"{b.consumer}-1",
    }


async def test_one_line_is_with_its_handlers_while_another_commits(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("by_column", partitions=2, batch=LINES)
    called = {0: asyncio.Event(), 1: asyncio.Event()}
    advance = Line._advance
    overlapped: set[int] = set()

    async def meet(messages: Messages[Any], db: Database) -> None:
        for partition in partition_of(messages):
            called[partition].set()

    async def wait_for_the_other(self: Line, connection: Any, shares: Any, sent: Any) -> None:
        """Goes on only when the other line's handler is called before this one's batch is committed."""
        (mine,) = partitions_of(self._share)
        if mine not in overlapped:
            async with asyncio.timeout(20):
                await called[1 - mine].wait()
            overlapped.add(mine)
        await advance(self, connection, shares, sent)

    monkeypatch.setattr(handlers, "meet", meet)
    monkeypatch.setattr(Line, "_advance", wait_for_the_other)
    b.send([*records(0), *records(1)])
    await b.run_until_done()
    assert overlapped == {0, 1}
    await all_done_once_and_in_order(b, [what for what in WHATS if what[0] in "01"])


async def test_line_that_runs_alone_after_a_deadlock_is_not_in_the_way_of_what_another_has_claimed(
    bench: MakeBench,
) -> None:
    """It waits for everything that others have claimed, some of it ahead; they must be able to finish it."""
    b = bench("by_column", partitions=PARTITIONS, batch=LINES)
    async with b.running():
        engine = await assigned(b)
        b.send(everything())
        await b.until(lambda: engine._counts.batches > 2, "at work")
        engine._lines[0]._turns.deadlocked()
        await b.done()
    await all_done_once_and_in_order(b, WHATS)


async def test_trouble_of_one_line_is_none_of_another(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("by_column", partitions=PARTITIONS, batch=LINES)
    async with b.running():
        engine = await assigned(b)
        unlucky = line_of(engine, 0)
        affected = partitions_of(unlucky._share)
        publish, failed = unlucky._publisher.publish, False

        async def fail_once(parcels: Any, *arguments: Any) -> None:
            nonlocal failed
            if parcels and not failed:
                failed = True
                raise BatchAborted("as told")
            await publish(parcels, *arguments)

        monkeypatch.setattr(unlucky._publisher, "publish", fail_once)
        b.send(everything())
        await b.done()
    assert failed
    assert len(events(logs, "starting_over")) == 1
    epochs = {row["partition"]: row["epoch"] for row in await b.rows("SELECT partition, epoch FROM ledger")}
    assert epochs == {partition: 2 if partition in affected else 1 for partition in range(PARTITIONS)}
    await all_done_once_and_in_order(b, WHATS)


async def test_partitions_that_are_halted_end_the_process_only_when_all_are(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("by_column", partitions=2, batch=LINES, failure={"policy": "halt"})

    async def refuse(messages: Messages[Any], db: Database) -> None:
        if any(id_.endswith(".bad") for id_ in messages.ids):
            raise Reject("as told")

    monkeypatch.setattr(handlers, "meet", refuse)

    async def one_after_the_other() -> None:
        async with b.running():
            await assigned(b)
            b.send([Sent({"what": "0.bad"}, id="0.bad", partition=0)])
            await b.until(lambda: any(a.halted for a in b.engines[0]._source.owned()), "halted")
            b.send(records(1))
            await b.done_with(1)
            b.send([Sent({"what": "1.bad"}, id="1.bad", partition=1)])
            await b.until(lambda: False, "its end")

    with pytest.raises(Halt, match=r"\[0\].*\[1\]|\[1\].*\[0\]"):
        await one_after_the_other()
    assert await b.effects() == [f"1.{n}" for n in range(EACH)]


async def test_line_that_waits_for_its_turn_longer_than_a_transaction_may_be_idle_keeps_it(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("by_column", partitions=2, batch=LINES, database={"idle_in_transaction_timeout_ms": 1500})
    waiting = asyncio.Event()
    until_free = Line._until_free

    async def watched(self: Line, connection: Any) -> None:
        if self._handlers.locked():
            waiting.set()
        await until_free(self, connection)

    async def stall(messages: Messages[Any], db: Database) -> None:
        if "0.0" in messages.ids:
            while not waiting.is_set():  # its own transaction must not be idle either
                await db.execute("SELECT pg_sleep(0.05)")
            for _ in range(8):  # much longer than the other's transaction may be idle
                await db.execute("SELECT pg_sleep(0.3)")

    monkeypatch.setattr(Line, "_until_free", watched)
    monkeypatch.setattr(handlers, "meet", stall)
    async with b.running():
        await assigned(b)
        b.send(records(0, SIZE))
        await b.until(lambda: handlers.calls["0.0"], "stalled")
        b.send(records(1, SIZE))
        await b.done()
    assert waiting.is_set()
    assert events(logs, "starting_over") == []
    assert Counter(await b.effects()) == Counter(f"{p}.{n}" for p in range(2) for n in range(SIZE))


async def test_message_that_two_lines_have_at_a_time_acts_once(bench: MakeBench, logs: list[Any]) -> None:
    """Its id is in partitions of both. The lease of one line holds off the other, as it holds off another process."""
    b = bench({"T": {"call": "hold_up", "effect": True}}, partitions=2, batch=LINES)
    async with b.running():
        await assigned(b)
        b.send([Sent({"what": "once"}, id="same", partition=partition) for partition in range(2)])
        await b.until(lambda: handlers.calls["same"] > 1 or events(logs, "partition_held"), "the other one has met it")
        handlers.gate.set()
        await b.done()
    assert handlers.calls["same"] == 1


async def test_full_buffer_of_one_line_does_not_keep_another_from_reading(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Partition 0 has far more than may be buffered, and is slow; what comes for partition 1 is done meanwhile."""
    limit = 200_000
    batch = {"in_flight": 2, "max_messages": 50, "buffer_bytes": limit, "max_bytes": limit // 2}
    b = bench("by_column", partitions=2, batch=batch)
    full: list[int] = []
    left: list[int] = []

    async def slowly(messages: Messages[Any], db: Database) -> None:
        source = b.engines[0]._source
        full.append(source.buffered_bytes)
        if partition_of(messages) == {1}:
            left.append(line_of(b.engines[0], 0)._share.records)
        else:
            await db.execute("SELECT pg_sleep(0.05)")

    monkeypatch.setattr(handlers, "meet", slowly)
    async with b.running():
        engine = await assigned(b)
        b.send(records(0, 2000))
        await b.until(lambda: engine._source.buffered_bytes >= limit // 2, "its part of the buffer is full")
        b.send(records(1, 10))
        await b.done()
    assert left, "partition 1 was done"
    assert min(left) > 0, "before partition 0 was"
    assert max(full) < limit + 2 * 50 * 1000, "no more than a bite beyond it for each line"
    assert Counter(await b.effects()) == Counter([f"0.{n}" for n in range(2000)] + [f"1.{n}" for n in range(10)])
    assert sql.value(b.database, "SELECT max(epoch) FROM ledger") == 1
