"""Partitions whose brokers are gone: whoever can go on does."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from processor.stack import Stack
from tests.conftest import Databases, unique
from tests.support import handlers, servers, sql
from tests.support.bench import EFFECTS, SECONDS, Bench, Sent, write_config
from tests.support.waiting import eventually


@pytest.fixture(scope="module")
def three_brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with servers.embedded(tmp_path_factory.mktemp("three") / "stack", brokers=3) as stack:
        yield stack


async def test_partition_without_a_leader_does_not_keep_the_others_waiting_and_is_read_when_it_has_one(
    three_brokers: Stack, tmp_path: Path
) -> None:
    b = bench(three_brokers, tmp_path)
    doomed = three_brokers.brokers[2]
    doomed.kill()
    try:
        eventually(lambda: leaders(b) == [1, -1], SECONDS, "a partition without a leader")
        async with b.running():
            b.send([Sent({"what": "goes on"}, id="m0", partition=0)])
            await b.until(lambda: handlers.calls["m0"], "the other partition is read")
            await asyncio.to_thread(doomed.start)
            b.send([Sent({"what": "comes later"}, id="m1", partition=1)])
            await b.done()
    finally:
        if not doomed.running:
            doomed.start()
    assert await b.effects() == ["goes on", "comes later"]


def bench(stack: Stack, folder: Path) -> Bench:
    """Its input has one partition on the first broker, and one on the last."""
    consumer, source, target = unique("bench"), unique("in"), unique("out")
    admin = AdminClient({"bootstrap.servers": stack.bootstrap_servers, "log_level": 0})
    placed = NewTopic(source, 2, replica_assignment=[[1], [3]])
    for made in admin.create_topics([placed, NewTopic(target, 1, 3)]).values():
        made.result(SECONDS)
    database = Databases(stack.postgres_url).migrated()
    sql.execute(database, EFFECTS)
    path = folder / "bench.toml"
    write_config(path, consumer, source, stack, database, {"T": "tests.support.handlers:apply"}, {})
    handlers.reset(target)
    return Bench(path, consumer, source, target, database, stack.bootstrap_servers, 2)


def leaders(bench: Bench) -> list[int]:
    partitions = bench.admin.list_topics(bench.input, timeout=SECONDS).topics[bench.input].partitions
    return [partitions[number].leader for number in sorted(partitions)]
