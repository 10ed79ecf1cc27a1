"""Members come and go: what stays goes on without a hiccup, and what leaves is let go."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from confluent_kafka import ConsumerGroupState

from processor import Retry
from processor.engine.engine import Engine
from processor.kafka.membership import Membership
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.logs import events

ALARMS = ("starting_over", "not_ready", "recovery_retried")


def alarms(logs: list[Any]) -> list[Any]:
    return [event for name in ALARMS for event in events(logs, name)]


def remembered_metadata(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on the publish thread is first given the metadata of this moment, however old it is by then."""
    membership = engine.membership
    old = membership.metadata()
    refused: list[Any] = []

    def metadata(was_refused: Any = None) -> Any:
        if was_refused is None:
            return old
        refused.append(was_refused)
        return membership.metadata(was_refused)

    monkeypatch.setattr(engine.parts.producer, "_group_metadata", metadata)
    return refused


async def test_publication_that_is_refused_for_an_old_generation_is_sent_again_and_nothing_starts_over(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(partitions=2)
    async with b.running():
        (first,) = b.engines
        await b.until(lambda: len(first.reader.fetching()) == 2, "both partitions")
        refused = remembered_metadata(first, monkeypatch)
        everyone = b.tasks
        async with b.running():
            b.tasks = [*everyone, *b.tasks]
            await b.until(lambda: len(b.engines[0].reader.fetching()) == 1, "one of them moved")
            (stayed,) = first.reader.owned()
            b.send([Sent({"what": f"m{n}"}, b"k", id=f"m{n}", partition=stayed.partition.number) for n in range(3)])
            await b.done()
            assert alarms(logs) == []
    assert refused, "the old metadata was not refused: nothing was tested"
    assert await b.effects() == ["m0", "m1", "m2"]
    assert sorted(value["what"] for _, value, _ in b.outputs()) == ["m0", "m1", "m2"]


async def test_partition_that_stays_is_neither_recovered_nor_read_again_when_another_one_moves(
    bench: MakeBench, logs: list[Any]
) -> None:
    b = bench(partitions=2)
    async with b.running():
        (first,) = b.engines
        await b.until(lambda: len(first.reader.fetching()) == 2, "both partitions")
        readings = {assignment: assignment.reading for assignment in first.reader.owned()}
        async with b.running():
            await b.until(lambda: len(b.engines[0].reader.fetching()) == 1, "one of them moved")
            (stayed,) = first.reader.owned()
            assert stayed.reading == readings[stayed], "what was read ahead of it was thrown away"
            ready = [event["partition"] for event in events(logs, "partition_ready")]
            assert ready.count(str(stayed.partition)) == 1
            assert alarms(logs) == []


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
async def test_partition_that_is_read_anew_while_a_rebalance_waits_to_be_heard_does_not_answer_it(
    bench: MakeBench, logs: list[Any], protocol: str
) -> None:
    """librdkafka takes any call that assigns or unassigns for the answer to a rebalance that is still in its queue."""
    b = bench("planned", partitions=2, retry={"attempts": 2}, kafka={"group_protocol": protocol})
    async with b.running():
        (first,) = b.engines
        await b.until(lambda: len(first.reader.fetching()) == 2, "both partitions")
        with stalled(first) as stall:
            everyone = b.tasks
            async with b.running():
                b.tasks = [*everyone, *b.tasks]
                (second,) = b.engines
                await b.until(lambda: asyncio.to_thread(is_rebalancing, b), "a rebalance that waits for the first")
                handlers.plans["m0"] = iter([Retry("not yet")])
                b.send([Sent({"what": f"m{n}"}, b"k", id=f"m{n}", partition=0) for n in range(3)])
                await b.until(lambda: handlers.calls["m0"] == 2, "a partition that was given back and taken anew")
                assert second.reader.owned() == [], "the group has moved on without our answer"
                assert len(first.reader.owned()) == 2
                stall.set()
                await b.until(lambda: len(second.reader.fetching()) == 1, "a partition each")
                await b.until(lambda: len(first.reader.fetching()) == 1, "a partition each")
                await b.done()
    assert await b.effects() == ["m0", "m1", "m2"]
    assert sorted(value["what"] for _, value, _ in b.outputs()) == ["m0", "m1", "m2"]
    assert next(revoked["finished"] for revoked in events(logs, "partitions_revoked"))
    assert alarms(logs) == []


async def test_work_that_ends_after_its_partition_was_lost_and_given_to_us_anew_does_not_stop_it(
    bench: MakeBench,
) -> None:
    b = bench()
    async with b.running():
        source = b.engines[0].reader
        await b.until(source.fetching, "the partition")
        (before,) = source.owned()
        source.leave([before])
        source.disown([before])
        source.assign([before.partition])
        await b.until(source.fetching, "the partition once more")
        source.suspend([before])
        b.send([Sent({"what": "m0"})])
        await b.done()
    assert await b.effects() == ["m0"]


@contextmanager
def stalled(engine: Engine) -> Iterator[threading.Event]:
    """The group thread hears of nothing until the event is set."""
    membership, go_on = engine.membership, threading.Event()
    assert isinstance(membership, Membership)
    refresh = membership._refresh

    def wait() -> None:
        go_on.wait()
        refresh()

    membership._refresh = wait  # type: ignore[method-assign]
    try:
        yield go_on
    finally:
        membership._refresh = refresh  # type: ignore[method-assign]
        go_on.set()


def is_rebalancing(bench: Bench) -> bool:
    """The group has met the second member, and waits for the first."""
    group = bench.admin.describe_consumer_groups([bench.consumer])[bench.consumer].result()
    return group.state is ConsumerGroupState.PREPARING_REBALANCING or len(group.members) == 2
