"""An output topic that is deleted although outputs for it are stored: only the partitions that have them wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.conftest import Topics
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import SECONDS, Bench, Sent
from tests.support.logs import events
from tests.support.publishing import Kafka, crash


def to_the_topic(what: str) -> Sent:
    return Sent({"what": what}, id=what, type="N", partition=0)


def to_the_other(what: str) -> Sent:
    return Sent({"what": what}, id=what, partition=1)


def said(bench: Bench, topic: str) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs(topic)]


@pytest.mark.parametrize("noticed", ["while it runs", "after a crash"])
async def test_output_topic_deleted_while_outputs_for_it_are_stored_holds_up_only_their_partition_until_it_is_there(
    bench: MakeBench, logs: list[Any], topics: Topics, monkeypatch: pytest.MonkeyPatch, noticed: str
) -> None:
    # Full batches do not wait until Kafka is done with the one before.
    b = bench(
        {"N": "to_nowhere", "T": "apply"}, partitions=2, batch={"max_messages": 1}, kafka={"revoke_timeout_ms": 100}
    )
    topic = handlers.nowhere = topics("fleeting")
    async with b.running():
        b.send([to_the_topic("a"), to_the_other("b")])
        await b.done()
        kafka = Kafka(b.engines[0], monkeypatch)
        b.send([to_the_other("c")])
        await b.until(lambda: kafka.waiting, "publishing")
        b.send([to_the_topic("d"), to_the_other("e")])
        await b.until(lambda: _applied(b, "abcde"), "committed in Postgres, to be published in one transaction")
        await asyncio.to_thread(_delete, b, topic)
        if noticed == "after a crash":
            await crash(b)
        else:
            kafka.open.set()
            await _goes_out_again_once_the_topic_is_there(b, logs, topics, topic)
    if noticed == "after a crash":
        async with b.running():
            await _goes_out_again_once_the_topic_is_there(b, logs, topics, topic)
    assert said(b, topic) == ["d"]
    assert said(b, b.output) == ["b", "c", "e", "f"]
    assert await _applied(b, "abcdef")
    assert set(handlers.calls.values()) == {1}, "no handler ran again"


async def _goes_out_again_once_the_topic_is_there(bench: Bench, logs: list[Any], topics: Topics, topic: str) -> None:
    def waiting() -> bool:
        reason = f"{bench.input}[0]: output topic {topic} does not exist; create it"
        return bool(events(logs, "recovery_retried", reason=reason, partitions=[f"{bench.input}[0]"]))

    await bench.until(waiting, "it waits, and says why")
    bench.send([to_the_other("f")])
    await bench.done_with(1)
    assert bench.committed()[0] == 1
    assert not bench.engines[0].readiness.ready
    topics(topic, exact=True)
    await bench.done()
    await bench.until(lambda: bench.engines[0].readiness.ready, "nothing is left in the way")
    assert not events(logs, "partition_halted")


async def _applied(bench: Bench, whats: str) -> bool:
    return sorted(await bench.effects()) == list(whats)


def _delete(bench: Bench, topic: str) -> None:
    bench.admin.delete_topics([topic])[topic].result(SECONDS)
