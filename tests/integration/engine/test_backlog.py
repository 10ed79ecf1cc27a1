"""Full batches that follow each other under a backlog, claimed by COPY while no key is known."""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import asyncpg
import pytest

from processor import Database, Messages, Retry
from processor.engine.engine import Engine
from processor.postgres.claims import COPY_FROM
from processor.postgres.deadlocks import DeadlockGate
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent

SIZE = COPY_FROM  # of a batch: the smallest that is claimed by COPY
BATCHES = 6
COUNT = SIZE * BATCHES

HANDLERS = {"T": "by_column", "G": "hold_up"}
BATCH: dict[str, Any] = {"batch": {"max_messages": SIZE}}
WHATS = [f"w{n}" for n in range(COUNT)]


def numbered(count: int = COUNT, first: int = 0, partition: int = 0) -> list[Sent]:
    return [
        Sent({"what": f"w{n}"}, f"k{n % 50}".encode(), id=f"m{n}", partition=partition)
        for n in range(first, first + count)
    ]


async def backlog(bench: Bench, records: Sequence[Sent]) -> Engine:
    """All of these are read while the engine is busy with one before them; then full batches follow each other."""
    (engine,) = bench.engines
    handlers.gate.clear()
    bench.send([Sent({"what": "gate"}, b"gate", "G", "gate")])
    await bench.until(lambda: handlers.calls["gate"], "busy")
    bench.send(records)
    await bench.until(lambda: engine.reader.buffered == len(records), "all of them read")
    handlers.gate.set()
    return engine


async def work_off(bench: Bench, records: Sequence[Sent]) -> None:
    """A backlog of these, from a start to the end of it."""
    async with bench.running():
        await backlog(bench, records)
        await bench.done()


def said(bench: Bench) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs()]


async def not_completed(bench: Bench) -> dict[str, str]:
    return {id_: row["status"] for id_, row in (await bench.inbox()).items() if row["status"] != "completed"}


async def open_transactions(bench: Bench) -> int:
    """Of the consumer, while it does nothing in them."""
    (row,) = await bench.rows(
        "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name = $1 AND state LIKE 'idle in transaction%'",
        f"processor:{bench.consumer}",
    )
    return int(row["n"])


async def test_backlog_of_batch_handlers_is_done_once_and_in_order(bench: MakeBench) -> None:
    b = bench(HANDLERS, **BATCH)
    await work_off(b, numbered())
    assert await b.effects() == said(b) == WHATS
    assert await not_completed(b) == {}
    assert len(await b.inbox()) == COUNT + 1
    assert {id_: count for id_, count in handlers.calls.items() if count > 1} == {}


async def test_backlog_of_handlers_of_single_messages_is_done_once_and_in_order(bench: MakeBench) -> None:
    b = bench({"T": "apply", "G": "hold_up"}, **BATCH)
    await work_off(b, numbered())
    assert await b.effects() == said(b) == WHATS


async def test_handlers_of_a_batch_see_what_the_one_before_wrote(bench: MakeBench) -> None:
    b = bench({"T": "say_how_many", "G": "hold_up"}, **BATCH)
    await work_off(b, numbered())
    assert [value["before"] for _, value, _ in b.outputs()] == list(range(COUNT))


async def test_message_that_comes_again_in_the_next_batch_is_done_once(bench: MakeBench) -> None:
    b = bench(HANDLERS, **BATCH)
    sent = numbered()
    sent[2 * SIZE + 30] = numbered()[SIZE + 10]
    await work_off(b, sent)
    assert await b.effects() == said(b) == [what for what in WHATS if what != f"w{2 * SIZE + 30}"]
    assert handlers.calls[f"m{SIZE + 10}"] == 1
    assert await not_completed(b) == {}
    assert (await b.inbox())[f"m{SIZE + 10}"]["offset"] == SIZE + 11


async def test_all_messages_of_a_batch_come_again_in_the_next(bench: MakeBench) -> None:
    b = bench(HANDLERS, **BATCH)
    once = numbered()
    await work_off(b, [record for n in range(BATCHES) for record in once[n * SIZE : (n + 1) * SIZE] * 2])
    assert await b.effects() == said(b) == WHATS
    assert set(handlers.calls.values()) == {1}


async def test_message_that_fails_gets_its_try_when_it_comes_again_in_the_next_batch(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)
    sent = numbered()
    again = f"m{SIZE + 10}"
    sent[2 * SIZE + 30] = numbered()[SIZE + 10]

    async def meet(messages: Messages[Any], _db: Database) -> None:
        if again in messages.ids and messages[messages.ids.index(again)].offset == SIZE + 11:
            raise RuntimeError(f"told to fail on {again}")

    monkeypatch.setattr(handlers, "meet", meet)
    await work_off(b, sent)
    good = [what for what in WHATS if what not in (f"w{SIZE + 10}", f"w{2 * SIZE + 30}")]
    expected = [*good[: 2 * SIZE + 29], f"w{SIZE + 10}", *good[2 * SIZE + 29 :]]
    assert await b.effects() == said(b) == expected
    assert await not_completed(b) == {}
    row = (await b.inbox())[again]
    assert (row["status"], row["attempts"]) == ("completed", 2)


async def test_other_payload_under_an_id_of_the_batch_before_fails_as_a_collision(bench: MakeBench) -> None:
    b = bench(HANDLERS, **BATCH)
    sent = numbered()
    sent[2 * SIZE + 30] = Sent({"what": "another"}, b"k", id=f"m{SIZE + 10}")
    await work_off(b, sent)
    assert await b.effects() == said(b) == [what for what in WHATS if what != f"w{2 * SIZE + 30}"]
    assert await not_completed(b) == {f"m{SIZE + 10}~{b.place(2 * SIZE + 31)}": "failed"}


async def test_two_workers_that_claim_the_same_messages_in_opposite_order_wait_for_each_other_and_not_for_ever(
    bench: MakeBench,
) -> None:
    b = bench(HANDLERS, partitions=2, **BATCH)
    async with b.running(engines=2):
        await b.until(lambda: all(len(engine.reader.fetching()) == 1 for engine in b.engines), "one partition each")
        b.send([Sent({"what": "gate"}, b"gate", "G", f"gate{n}", partition=n) for n in range(2)])
        await b.until(lambda: handlers.calls["gate0"] and handlers.calls["gate1"], "both busy")
        b.send([*numbered(), *reversed(numbered(partition=1))])
        await b.until(lambda: sum(engine.reader.buffered for engine in b.engines) == 2 * COUNT, "all of them read")
        handlers.gate.set()
        await b.done()
    assert Counter(await b.effects()) == Counter(said(b)) == Counter(WHATS)
    assert await not_completed(b) == {}
    assert len(await b.inbox()) == COUNT + 2


@pytest.mark.parametrize("policy", ["dead-letter", "park-key"])
async def test_message_that_fails_in_a_full_batch_leaves_no_transaction_open(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    b = bench(HANDLERS, **BATCH, failure={"policy": policy})
    bad = SIZE + 10
    tries: list[int] = []  # how many messages

    async def fail(messages: Messages[Any], _db: Database) -> None:
        if f"m{bad}" in messages.ids:
            tries.append(len(messages))
            raise RuntimeError("as told")

    monkeypatch.setattr(handlers, "meet", fail)
    async with b.running():
        await backlog(b, numbered())
        await b.done()
        assert await open_transactions(b) == 0
    parked = [n for n in range(bad + 1, COUNT) if n % 50 == bad % 50] if policy == "park-key" else []
    good = [f"w{n}" for n in range(COUNT) if n != bad and n not in parked]
    assert await b.effects() == said(b) == good
    assert await not_completed(b) == {f"m{bad}": "failed", **{f"m{n}": "parked" for n in parked}}
    assert (tries[0], tries[-1]) == (SIZE, 1)


async def test_partition_waits_while_the_other_goes_on(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a batch of both, only the records of the one that waits are forgotten, and read again."""
    b = bench(HANDLERS, partitions=2, **BATCH, retry={"attempts": 9})
    half = COUNT // 2
    sent = [*numbered(half), *numbered(half, half, partition=1)]
    later = "m60"  # of partition 0
    alone: list[int] = []

    async def come_again(messages: Messages[Any], _db: Database) -> None:
        if later in messages.ids:
            if len(messages) == 1:
                alone.append(messages[0].attempt)
            if len(alone) < 2:
                raise Retry("not yet", after=0.0)

    monkeypatch.setattr(handlers, "meet", come_again)
    await work_off(b, sent)
    whats = await b.effects()
    assert sorted(whats) == sorted(said(b)) == sorted(WHATS)
    first = {f"w{n}" for n in range(half)}
    for own in (first, set(WHATS) - first):
        assert [what for what in whats if what in own] == [what for what in WHATS if what in own]
    assert alone == [1, 2]


async def test_full_batch_that_fails_with_nobody_at_fault_runs_again(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)
    stumbled: list[int] = []

    async def stumble(messages: Messages[Any], db: Database) -> None:
        if f"m{SIZE}" in messages.ids and not stumbled:
            stumbled.append(len(messages))
            await db.execute("DO $$ BEGIN RAISE 'as told' USING ERRCODE = '40001'; END $$")

    monkeypatch.setattr(handlers, "meet", stumble)
    await work_off(b, numbered())
    assert await b.effects() == said(b) == WHATS
    assert stumbled == [SIZE]


def turn(bench: Bench) -> int:
    """The advisory lock that every batch of this consumer holds."""
    digest = hashlib.sha256(f"processor-turn:{bench.consumer}".encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)


async def test_batch_begins_with_the_commit_of_the_one_before(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)
    begun: list[str] = []
    begin_sql = DeadlockGate.begin_sql

    def noted(self: DeadlockGate, **options: Any) -> str:
        begun.append(begin_sql(self, **options))
        return begun[-1]

    async with b.running():
        await backlog(b, numbered())
        monkeypatch.setattr(DeadlockGate, "begin_sql", noted)
        await b.done()
    assert begun == []
    assert sorted(await b.effects()) == sorted(WHATS)


async def test_turn_that_somebody_wants_for_himself_is_let_go_between_two_batches(bench: MakeBench) -> None:
    b = bench(HANDLERS, **BATCH)
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'"
    other = await asyncpg.connect(b.database)
    try:
        async with b.running():
            handlers.gate.clear()
            b.send([Sent({"what": "gate"}, b"gate", "G", "gate")])
            await b.until(lambda: handlers.calls["gate"], "busy")
            b.send(numbered())
            await b.until(lambda: b.engines[0].reader.buffered == COUNT, "all of them read")
            alone = asyncio.create_task(other.execute(f"SELECT pg_advisory_lock({turn(b)})"))
            await b.until(lambda: b.rows(waiting), "the other waits for its turn")
            handlers.gate.set()
            await alone
            await b.until(lambda: b.rows(waiting), "now we wait")
            assert (await b.effects(), len(await b.inbox())) == ([], 1)
            await other.execute(f"SELECT pg_advisory_unlock({turn(b)})")
            await b.done()
    finally:
        await other.close()
    assert sorted(await b.effects()) == sorted(WHATS)


async def test_transaction_that_was_begun_for_a_batch_is_ended_if_the_batch_does_not_come(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)
    open_ones = """SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock' AND granted
                   AND (classid::bigint << 32 | objid::bigint) = $1"""
    async with b.running():
        (engine,) = b.engines
        add = engine.parts.publishing.add

        def lose_what_was_read(*arguments: Any, **options: Any) -> None:
            engine.reader.suspend(engine.reader.owned())
            add(*arguments, **options)

        monkeypatch.setattr(engine.parts.publishing, "add", lose_what_was_read)
        await backlog(b, numbered())

        async def ended() -> bool:
            return not await b.rows(open_ones, turn(b))

        await b.until(ended, "no transaction is open")
        assert engine.parts.transactions.begun is None
    assert (await b.effects(), len(await b.inbox())) == ([], 1)
