"""Retention beside a running service: one member goes round, and its work goes on."""

from __future__ import annotations

import asyncio
import gzip
import json
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from processor.errors import BatchAborted
from processor.kafka.cluster import Cluster
from processor.postgres import pruning
from processor.retention import survey
from processor.retention.round import Hand
from processor.settings.load import load
from tests.integration.conftest import MakeBench
from tests.integration.retention.conftest import age, offsets, prune
from tests.support import command
from tests.support.bench import Bench, Sent
from tests.support.logs import events

OLD = """
    INSERT INTO inbox (key, partition_id, "offset", payload_hash, received_at, message_id)
    SELECT gen_random_uuid(), partition_id, 0, n, now() - interval '30 days', 'old ' || n || E' \\u2603'
    FROM ledger, generate_series(1, 2000) n
"""


async def test_one_of_two_members_goes_round_and_what_comes_meanwhile_is_processed(
    bench: MakeBench, at_once: None, logs: list[Any]
) -> None:
    b = bench(partitions=2)
    b.send([Sent({"what": f"w{n}"}, id=f"m{n}", partition=n % 2) for n in range(20)])
    await b.run_until_done()
    await age(b, 8)
    async with b.running(engines=2):
        b.send([Sent({"what": f"x{n}"}, id=f"x{n}", partition=n % 2) for n in range(20)])
        await b.done()
        await b.until(lambda: events(logs, "retention_pruned"), "a round")
        await b.until(lambda: events(logs, "retention_pruned") and _looked(b), "every member has looked")
        assert [event["deleted"] for event in events(logs, "retention_pruned")] == [20]
    assert len(await b.effects()) == 40
    assert len(await offsets(b)) == 20


async def _looked(bench: Bench) -> bool:
    """Whether nobody holds the lock of the elected member any more."""
    held = """SELECT FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1 AND granted
              AND (classid::bigint << 32) | objid::bigint = $1"""
    return not await bench.rows(held, pruning.lock_key(bench.consumer))


async def test_error_that_only_retention_meets_does_not_end_the_service(
    bench: MakeBench, at_once: None, logs: list[Any]
) -> None:
    b = bench()
    async with b.running():
        await b.execute("ALTER TABLE log_ends RENAME TO elsewhere")
        await b.until(lambda: events(logs, "retention_failed"), "a round is given up")
        b.send([Sent({"what": "w"}, id="m")])
        await b.done()
        await b.execute("ALTER TABLE elsewhere RENAME TO log_ends")
        await b.until(lambda: events(logs, "retention_pruned"), "a round")
    assert "log_ends" in events(logs, "retention_failed")[0]["reason"]


async def test_command_waits_until_the_service_s_round_is_over(bench: MakeBench) -> None:
    b = bench()
    b.send([Sent({"what": "w"}, id="m")])
    await b.run_until_done()
    await age(b, 8)
    service = await asyncpg.connect(b.database)
    try:
        assert await pruning.elect(service, b.consumer)
        pruning_too = asyncio.create_task(prune(b))
        asking = "SELECT FROM pg_stat_activity WHERE query = $1 AND pid <> $2"
        while not await b.rows(asking, pruning.ELECT, service.get_server_pid()):
            assert not pruning_too.done()
        assert await offsets(b) == [0]
        await pruning.resign(service, b.consumer)
        assert (await pruning_too)["deleted"] == 1
    finally:
        await service.close()


async def test_service_is_behind_when_any_process_has_a_batch_waiting_behind_the_one_it_is_at(bench: MakeBench) -> None:
    b = bench(partitions=2, batch={"max_messages": 2})
    b.send([Sent({"what": "w"}, id=f"m{n}", partition=n % 2) for n in range(6)])
    await b.run_until_done()
    settings = load(b.config, {})
    cluster = Cluster(settings.kafka, settings.consumer)
    connection = await asyncpg.connect(b.database)

    async def behind(*positions: int) -> bool:
        for partition, position in enumerate(positions):
            await connection.execute("UPDATE ledger SET next_offset = $2 WHERE partition = $1", partition, position)
        return await survey.behind(connection, settings, cluster)

    try:
        assert not await behind(3, 3)
        assert not await behind(0, 3)
        assert await behind(0, 2)
        await connection.execute("UPDATE ledger SET owner = 'another' WHERE partition = 1")
        assert not await behind(0, 2)
    finally:
        cluster.close()
        await connection.close()


async def test_step_waits_for_nobody_who_works_on_a_row_and_the_next_round_takes_it(bench: MakeBench) -> None:
    b = bench()
    b.send([Sent({"what": "w"}, id="m"), Sent({"what": "v"}, id="n")])
    await b.run_until_done()
    await age(b, 8)
    other = await asyncpg.connect(b.database)
    try:
        async with other.transaction():
            await other.execute('SELECT FROM inbox WHERE "offset" = 0 FOR UPDATE')
            assert (await prune(b))["deleted"] == 0
        assert (await prune(b))["deleted"] == 2
    finally:
        await other.close()


async def test_another_process_that_begins_shuts_out_the_one_before(bench: MakeBench) -> None:
    """Such as one that was frozen, and lost its lock with its connection: it may neither delete nor archive."""
    b = bench()
    first = await asyncpg.connect(b.database)
    try:
        old, new = (pruning.Round(first, b.consumer, owner) for owner in ("old", "new"))
        await old.take()
        async with first.transaction():
            assert await old.go_on(5, durable=False)
        await new.take()
        async with first.transaction():
            assert not await old.go_on(6, durable=False)
            assert await new.go_on(6, durable=False)
    finally:
        await first.close()


async def test_nothing_goes_when_the_archive_cannot_be_written(bench: MakeBench, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    b = bench(retention={"archive": str(archive)})
    b.send([Sent({"what": "w"}, id="m")])
    await b.run_until_done()
    await age(b, 8)
    connection = await asyncpg.connect(b.database)
    settings = load(b.config, {})
    cluster = Cluster(settings.kafka, settings.consumer)
    try:
        hand = Hand(settings, connection, cluster)
        archive.rmdir()
        with pytest.raises(BatchAborted, match=r"^retention\.archive: .*No such file or directory"):
            await hand.go_round()
    finally:
        cluster.close()
        await connection.close()
    assert await offsets(b) == [0]


def read(files: list[Path]) -> list[bytes]:
    """With a standard tool."""
    return subprocess.run(["zcat", *files], capture_output=True, check=True).stdout.splitlines()


@pytest.mark.parametrize("point", ["before_forgetting", "after_forgetting"])
async def test_rows_are_in_the_archive_once_whenever_the_process_dies(
    point: str, bench: MakeBench, tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    archive.mkdir()
    b = bench(retention={"archive": str(archive), "pace": 100})
    b.send([Sent({"what": "w"}, id="m")])
    await b.run_until_done()
    await b.execute(OLD)
    old = "SELECT key::text FROM inbox WHERE message_id LIKE 'old %'"
    keys = {row["key"] for row in await b.rows(old)}

    killed = {"PROCESSOR_FAILPOINTS": f"{point}=kill@2"}
    doomed = await asyncio.to_thread(command.processor, Path.cwd(), "prune", str(b.config), environ=killed)
    assert doomed.returncode == -signal.SIGKILL, doomed
    left = {row["key"] for row in await b.rows(old)}
    assert 0 < len(left) < len(keys)
    assert [file.suffix for file in archive.iterdir()] == [".open"]
    done = await prune(b)
    assert done["deleted"] == len(left)
    assert await b.rows(old) == []

    files = sorted(archive.iterdir())
    assert [file.suffix for file in files] == [".gz", ".gz"], files
    assert done["archive"] in [file.name for file in files]
    messages = [json.loads(line) for line in read(files)]
    assert Counter(message["key"] for message in messages) == Counter(keys)
    assert {(message["consumer"], message["topic"], message["partition"]) for message in messages} == {
        (b.consumer, b.input, 0)
    }
    counted = await b.rows("SELECT file, bytes, messages FROM archived")
    assert {row["file"]: (row["bytes"], row["messages"]) for row in counted} == {
        file.name: (file.stat().st_size, len(gzip.decompress(file.read_bytes()).splitlines())) for file in files
    }
