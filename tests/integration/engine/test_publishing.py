"""Batches that are committed in Postgres and wait for Kafka: several in one transaction, none lost, none for long."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import pytest

from processor import Database, Messages
from processor.engine import publishing
from processor.engine.portions import OUTPUT_OVERHEAD
from processor.engine.publishing import TOGETHER
from processor.errors import BatchAborted
from processor.messages.outputs import EncodedOutputs
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.logs import events
from tests.support.publishing import Kafka, crash

SIZE = 10  # of a batch
BATCH = {"max_messages": SIZE, "linger_ms": 60_000}
FULL = 2 * TOGETHER - 1  # batches behind the first, which has one message: with it, as many as two transactions take


def records(count: int, first: int = 0) -> list[Sent]:
    return [Sent({"what": f"m{n}"}, b"k", id=f"m{n}") for n in range(first, first + count)]


def whats(count: int) -> list[str]:
    return [f"m{n}" for n in range(count)]


def said(bench: Bench) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs()]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is tested ends the waiting for company, never the clock."""
    monkeypatch.setattr(publishing, "LONGEST_HOLD_SECONDS", 3600.0)


async def behind_the_first(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, batches: int = FULL, held: str = "m0"
) -> Kafka:
    """The first message is a batch of its own; so many full ones are at hand behind it.

    The batch with the message that is `held` stays in its handler until the gate opens.
    """
    (engine,) = bench.engines
    await bench.until(engine.reader.fetching, "reading")
    kafka = Kafka(engine, monkeypatch)
    first, gate = asyncio.Event(), handlers.gate

    async def hold(messages: Messages[Any], db: Database) -> None:
        if "m0" in messages.ids:
            await first.wait()
        if held in messages.ids:
            await gate.wait()

    monkeypatch.setattr(handlers, "meet", hold)
    bench.send(records(1))
    await bench.until(lambda: handlers.calls["m0"], "the first one is in its handler")
    bench.send(records(batches * SIZE, 1))
    await bench.until(lambda: engine.reader.buffered == batches * SIZE, "the others are read")
    first.set()
    return kafka


async def test_under_a_backlog_batches_share_a_kafka_transaction(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("by_column", batch=BATCH)
    async with b.running():
        kafka = await behind_the_first(b, monkeypatch)
        kafka.open.set()
        handlers.gate.set()
        await b.done()
        await b.until(lambda: _nothing_stored(b), "forgotten when idle")
    assert kafka.sent == [1 + (TOGETHER - 1) * SIZE, TOGETHER * SIZE]
    assert said(b) == await b.effects() == whats(1 + FULL * SIZE)


async def test_what_nothing_follows_is_published_at_once(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    b = bench("by_column", batch=BATCH)
    async with b.running():
        kafka = await behind_the_first(b, monkeypatch, batches=0)
        kafka.open.set()
        handlers.gate.set()
        await b.done()
        for n in range(1, 3):
            b.send(records(1, n))
            await b.done()
    assert kafka.sent == [1, 1, 1]


async def test_a_batch_that_waits_for_company_does_not_wait_longer_than_it_may(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full batch is at hand, and its handler takes for ever."""
    monkeypatch.setattr(publishing, "LONGEST_HOLD_SECONDS", 0.05)
    b = bench("by_column", batch=BATCH)
    async with b.running():
        kafka = await behind_the_first(b, monkeypatch, batches=1, held="m1")
        kafka.open.set()
        await b.until(lambda: kafka.sent == [1], "the first one published, the second one in its handler")
        handlers.gate.set()
        await b.done()
    assert said(b) == whats(1 + SIZE)


async def test_what_may_be_between_the_two_systems_is_bounded(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("by_column", batch=BATCH)
    async with b.running():
        kafka = await behind_the_first(b, monkeypatch, batches=2 * FULL)
        parts = b.engines[0].parts
        held_up = asyncio.Event()
        wait = parts.publishing._next

        async def watched() -> None:
            held_up.set()
            await wait()

        monkeypatch.setattr(parts.publishing, "_next", watched)
        handlers.gate.set()
        await b.until(held_up.is_set, "no room")
        assert len(await b.rows("SELECT FROM unsent")) == 2 * TOGETHER
        assert await b.effects() == whats(1 + FULL * SIZE)
        kafka.open.set()
        await b.done()
    assert said(b) == await b.effects() == whats(1 + 2 * FULL * SIZE)


@pytest.mark.parametrize("published_before", [False, True])
async def test_batches_that_kafka_refused_are_sent_from_the_store_in_their_order_and_not_handled_again(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch, published_before: bool
) -> None:
    b = bench("by_column", batch=BATCH)
    async with b.running():
        kafka = await behind_the_first(b, monkeypatch, batches=2 * FULL)
        kafka.refuses_after = int(published_before)
        kafka.open.set()
        handlers.gate.set()
        await b.done()
    assert kafka.refused
    assert len(events(logs, "starting_over")) == 1
    (stored,) = [event["outputs"] for event in events(logs, "stored_outputs_sent")]
    assert stored > SIZE, "of several batches"
    published = 1 + (TOGETHER - 1) * SIZE if published_before else 0
    assert {handlers.calls[f"m{n}"] for n in range(published + stored)} == {1}, "no handler ran again"
    assert said(b) == await b.effects() == whats(1 + 2 * FULL * SIZE)


@pytest.mark.parametrize("published", [0, 1 + (TOGETHER - 1) * SIZE])
async def test_process_that_ends_with_several_batches_unpublished_leaves_them_to_the_next(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch, published: int
) -> None:
    """Of what was published it is not on record yet that it was: Kafka's offset tells."""
    b = bench("by_column", batch=BATCH, kafka={"revoke_timeout_ms": 100})
    async with b.running():
        kafka = await behind_the_first(b, monkeypatch)
        handlers.gate.set()
        await b.until(lambda: kafka.waiting, "publishing")
        await b.until(lambda: _stored(b, 2 * TOGETHER), "the others committed meanwhile")
        if published:
            kafka.open.set()
            kafka.open.clear()  # for the one that waits, and for no other
            await b.until(lambda: kafka.sent == [published] and kafka.waiting, "the next ones wait")
        await crash(b)
    assert said(b) == whats(published)
    assert await _stored(b, 2 * TOGETHER)
    await b.run_until_done()
    found = [event["found"] for event in events(logs, "partition_ready")]
    assert found == ["first_start", "died_between_commits"]
    assert [event["outputs"] for event in events(logs, "stored_outputs_sent")] == [1 + FULL * SIZE - published]
    assert set(handlers.calls.values()) == {1}, "no handler ran again"
    assert said(b) == await b.effects() == whats(1 + FULL * SIZE)


async def test_what_a_crash_left_unsent_is_sent_in_portions_and_another_crash_repeats_none_of_them(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench("by_column", batch=BATCH | {"max_bytes": 3000}, kafka={"revoke_timeout_ms": 100})
    async with b.running():
        kafka = await behind_the_first(b, monkeypatch)
        handlers.gate.set()
        await b.until(lambda: kafka.waiting, "publishing")
        await b.until(lambda: _stored(b, 2 * TOGETHER), "the others committed meanwhile")
        await crash(b)
    async with b.running():
        kafka = Kafka(b.engines[0], monkeypatch)
        for portions in range(1, 3):
            await b.until(lambda: kafka.waiting, "a portion")
            kafka.open.set()
            kafka.open.clear()  # for the one that waits, and for no other
            await b.until(lambda n=portions: len(kafka.sent) == n and kafka.waiting, "the next one waits")  # type: ignore[misc]
        await crash(b)
    sent = sum(kafka.sent)
    assert b.committed() == {0: sent}
    assert said(b) == whats(sent)
    async with b.running():
        kafka = Kafka(b.engines[0], monkeypatch)
        kafka.open.set()
        await b.done()
    assert len(kafka.sent) > 1
    assert all(outputs * OUTPUT_OVERHEAD < 3000 for outputs in kafka.sent)
    assert [event["found"] for event in events(logs, "partition_ready")] == ["first_start", "died_between_commits"]
    assert set(handlers.calls.values()) == {1}, "no handler ran again"
    assert said(b) == await b.effects() == whats(1 + FULL * SIZE)


async def test_each_try_of_recovery_sends_less_until_it_goes_through_and_the_other_partition_is_read_meanwhile(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    most, size = 16_000, 70
    batch = {"max_messages": size, "linger_ms": 60_000, "max_bytes": most}
    b = bench("by_column", partitions=2, batch=batch, kafka={"revoke_timeout_ms": 100})
    async with b.running():
        kafka = await behind_the_first(b, monkeypatch, batches=0)
        handlers.gate.set()
        await b.until(lambda: kafka.waiting, "publishing")
        b.send([*records(size - 1, 1), Sent({"what": "other"}, b"k", id="other", partition=1)])
        await b.until(lambda: _applied(b, 1 + size), "a full batch of both partitions is committed")
        await crash(b)
    async with b.running():
        producer = b.engines[0].parts.producer
        really = producer.publish
        refused: list[int] = []
        small_enough, read = asyncio.Event(), asyncio.Event()

        async def publish(parcels: Sequence[EncodedOutputs], *arguments: Any) -> None:
            """Takes a sixth of what a batch may have, as if more could not be sent in time."""
            sent = sum(map(bytes_of, parcels))
            if sent > most // 6:
                refused.append(sent)
                raise BatchAborted("as told: too much")
            if sum(map(len, parcels)) > 1:
                small_enough.set()
                await read.wait()
            await really(parcels, *arguments)

        monkeypatch.setattr(producer, "publish", publish)
        await b.until(small_enough.is_set, "the first portion that is not too much")
        b.send([Sent({"what": "read"}, b"k", id="read", partition=1)])
        await b.until(lambda: handlers.calls["read"], "the other partition is read")
        assert b.committed().get(0, 0) == 0
        read.set()
        await b.done()
    assert len(refused) == 3
    assert all(sent <= most >> tries for tries, sent in enumerate(refused))
    assert all(less < more for more, less in itertools.pairwise(refused))
    assert [len(event["partitions"]) for event in events(logs, "recovery_retried")] == [2, 1, 1]
    assert set(handlers.calls.values()) == {1}, "no handler ran again"
    assert sorted(said(b)) == sorted([*whats(size), "other", "read"])


def bytes_of(parcel: EncodedOutputs) -> int:
    """As recovery reckons them."""
    return sum(len(text or b"") for text in (*parcel.keys, *parcel.values)) + OUTPUT_OVERHEAD * len(parcel)


async def _applied(bench: Bench, count: int) -> bool:
    return len(await bench.effects()) == count


async def _stored(bench: Bench, batches: int) -> bool:
    return len(await bench.rows("SELECT FROM unsent")) == batches


async def _nothing_stored(bench: Bench) -> bool:
    return await _stored(bench, 0)
