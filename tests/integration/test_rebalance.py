"""Members come and go: what stays goes on without a hiccup, and what leaves is let go."""

from __future__ import annotations

from typing import Any

import pytest

from processor.engine import Engine
from tests.integration.conftest import MakeBench
from tests.support.bench import Sent
from tests.support.logs import events

ALARMS = ("starting_over", "not_ready", "recovery_retried")


def alarms(logs: list[Any]) -> list[Any]:
    return [event for name in ALARMS for event in events(logs, name)]


def remembered_metadata(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """From now on the publish thread is first given the metadata of this moment, however old it is by then."""
    membership, old = engine._membership, engine._membership.metadata()
    refused: list[Any] = []

    def metadata(was_refused: Any = None) -> Any:
        if was_refused is None:
            return old
        refused.append(was_refused)
        return membership.metadata(was_refused)

    monkeypatch.setattr(engine._loop._publisher, "_group_metadata", metadata)
    return refused


async def test_publication_that_is_refused_for_an_old_generation_is_sent_again_and_nothing_starts_over(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(partitions=2)
    async with b.running():
        (first,) = b.engines
        await b.until(lambda: len(first._source.fetching()) == 2, "both partitions")
        refused = remembered_metadata(first, monkeypatch)
        everyone = b._tasks
        async with b.running():
            b._tasks = [*everyone, *b._tasks]
            await b.until(lambda: len(b.engines[0]._source.fetching()) == 1, "one of them moved")
            (stayed,) = first._source.owned()
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
        await b.until(lambda: len(first._source.fetching()) == 2, "both partitions")
        readings = {assignment: assignment.reading for assignment in first._source.owned()}
        async with b.running():
            await b.until(lambda: len(b.engines[0]._source.fetching()) == 1, "one of them moved")
            (stayed,) = first._source.owned()
            assert stayed.reading == readings[stayed], "what was read ahead of it was thrown away"
            ready = [event["partition"] for event in events(logs, "partition_ready")]
            assert ready.count(str(stayed.partition)) == 1
            assert alarms(logs) == []
