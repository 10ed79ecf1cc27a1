"""`processor status`: what Kafka's own tools say, and what a process has written down about its trouble."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import asyncpg
import pytest
from confluent_kafka import Producer

from processor import Unavailable
from processor.engine import housekeeping
from processor.errors import Halt
from processor.messages.message import Partition
from processor.postgres import replays, slots
from processor.postgres.replays import Range
from processor.stack import Stack
from tests.integration.conftest import MakeBench
from tests.support import handlers, sql
from tests.support.bench import SECONDS, Bench
from tests.support.command import processor, processor_beside
from tests.support.deployments import PROJECT
from tests.support.proxy import Proxy, postgres_frame
from tests.support.scenes import messages
from tests.support.shop import Shop
from tests.support.terminal import terminal


async def status(bench: Bench, *arguments: str) -> dict[str, Any]:
    done = await processor_beside(PROJECT, "status", str(bench.config), *arguments, "--json")
    assert done.returncode == 0, done
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def state(bench: Bench, partition: int = 0) -> dict[str, Any]:
    found: dict[str, Any] = (await status(bench))["partitions"][partition]
    return found


def described(stack: Stack, group: str) -> dict[int, tuple[int, int, int]]:
    """Committed offset, end and lag of each partition, by Kafka's own tool."""
    done = stack.kafka_tool("kafka-consumer-groups", "--describe", "--group", group)
    assert done.returncode == 0, done
    found = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if words[:1] == [group]:
            found[int(words[2])] = int(words[3]), int(words[4]), int(words[5])
    return found


async def test_status_and_kafka_s_own_tool_agree_on_offsets_and_lag(bench: MakeBench, local_stack: Stack) -> None:
    b = bench(partitions=2)
    b.send([*messages("a", "b", "c"), *messages("d", partition=1)])
    await b.run_until_done()
    done = await status(b)
    assert [(one["state"], one["lag"], one["lag_seconds"]) for one in done["partitions"]] == [("no owner", 0, 0.0)] * 2
    b.send([*messages("e", "f"), *messages("g", "h", "i", partition=1)])
    found = await status(b)
    assert found["lag"] == 5
    theirs = await asyncio.to_thread(described, local_stack, b.consumer)
    ours = {one["partition"]: (one["committed"], one["end"], one["lag"]) for one in found["partitions"]}
    assert ours == theirs == {0: (3, 5, 2), 1: (1, 4, 3)}
    assert [one["position"] for one in found["partitions"]] == [3, 1]
    assert all(one["lag_seconds"] > 0 for one in found["partitions"])


@contextmanager
def upstream(bench: Bench) -> Iterator[Producer]:
    producer = Producer({"bootstrap.servers": bench.bootstrap_servers, "transactional.id": bench.input, "log_level": 0})
    producer.init_transactions(SECONDS)
    yield producer


def produce(producer: Producer, bench: Bench, id_: str) -> None:
    value = json.dumps({"what": id_}).encode()
    producer.produce(bench.input, value, b"k", 0, headers={"type": b"T", "message-id": id_.encode()})
    producer.flush(SECONDS)


async def test_topic_of_a_transactional_producer_that_was_read_to_its_end_has_no_lag(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeping, "LOOK_SECONDS", 3600.0)  # positions move past markers only now and then
    b = bench()
    with upstream(b) as producer:
        async with b.running():
            await b.until(lambda: b.engines[0].reader.fetching(), "reading")
            for id_ in ("first", "second"):
                producer.begin_transaction()
                produce(producer, b, id_)
                producer.commit_transaction(SECONDS)
            await b.until(lambda: b.committed().get(0, 0) >= 3, "committed")
            producer.begin_transaction()
            produce(producer, b, "third")  # nobody may read it yet
            found = await state(b)
            assert (found["position"], found["end"]) == (3, 4), "a marker is left, and the open transaction is no end"
            assert (found["state"], found["lag"], found["lag_seconds"]) == ("running", 0, 0.0)
            producer.abort_transaction(SECONDS)
            found = await state(b)
            assert (found["end"], found["lag"], found["lag_seconds"]) == (6, 0, 0.0), "aborted records are no lag"


async def test_partition_that_waits_says_why_until_it_goes_on(bench: MakeBench) -> None:
    b = bench("planned")
    handlers.plans["m0"] = iter([Unavailable("the gateway is down", after=30.0)])
    async with b.running():
        b.send(messages("m0"))
        await b.until(lambda: troubled(b), "written down")
        found = await state(b)
        assert (found["state"], found["lag"]) == ("outage", 1)
        assert "the gateway is down" in found["why"][0]
        assert found["since"] is not None
        (row,) = await troubled(b)
        await b.execute("SELECT pg_terminate_backend(backend) FROM partition_trouble")
        await b.until(lambda: written_anew(b, row["backend"]), "under the connection that holds the slot's lock now")
        again = await state(b)
        assert (again["state"], again["since"]) == ("outage", found["since"])
        (owned,) = b.engines[0].parts.partitions.owned()
        b.engines[0].parts.pauses._resume(owned)
        await b.done()
        await b.until(lambda: not_troubled(b), "taken back")
        found = await state(b)
        assert (found["state"], found["why"], found["lag"]) == ("running", [], 0)


async def troubled(bench: Bench) -> list[dict[str, Any]]:
    return await bench.rows("SELECT * FROM partition_trouble")


async def written_anew(bench: Bench, backend: int) -> bool:
    return [row["backend"] for row in await troubled(bench)] not in ([], [backend])


async def not_troubled(bench: Bench) -> bool:
    return not await troubled(bench)


async def test_halted_partition_keeps_its_reason_when_its_process_has_ended_until_another_one_takes_it(
    bench: MakeBench,
) -> None:
    b = bench("rejected", failure={"policy": "halt"})
    b.send(messages("m0"))
    with pytest.raises(Halt):
        await b.run_until_done()
    found = await state(b)
    assert (found["state"], found["lag"]) == ("no owner", 1)
    assert re.search(r"has ended with the partition halted: .*:0:0: ", found["why"][0])
    b.config.write_text(b.config.read_text().replace('"halt"', '"dead-letter"'))
    await b.run_until_done()
    assert await not_troubled(b)
    found = await state(b)
    assert (found["state"], found["lag"], found["failed"]) == ("no owner", 0, 1)
    assert "halted" not in found["why"][0]


@asynccontextmanager
async def living(shop: Shop, slot: int) -> AsyncIterator[int]:
    """A process that has leased a slot; the number of its backend."""
    connection = await asyncpg.connect(shop.database)
    await connection.execute("SELECT pg_advisory_lock($1, $2)", slots.lease_class(shop.consumer), slot)
    yield connection.get_server_pid()
    await connection.close()


WRITE = """
    INSERT INTO partition_trouble (consumer, topic, partition, kind, reason, since, epoch, backend)
    VALUES ($1, $2, 0, 'outage', 'the gateway is down', now() - interval '1 hour', $3, $4)
    ON CONFLICT (consumer, topic, partition) DO UPDATE SET epoch = excluded.epoch, backend = excluded.backend
"""


async def test_what_a_dead_or_former_owner_has_written_down_is_not_taken_for_the_truth(shop: Shop) -> None:
    def shown() -> tuple[str, str]:
        done = processor(shop.folder, "status", "shop.toml", "--json")
        one = json.loads(done.stdout)["partitions"][0]
        return one["state"], " ".join(one["why"])

    def write(epoch: int, backend: int) -> None:
        sql.execute(shop.database, WRITE, shop.consumer, shop.topic, epoch, backend)

    nobody = 2**22 + 7
    write(1, nobody)
    state, why = shown()
    assert state == "no owner"
    assert "me, its last owner, has ended with the partition held up by an outage: the gateway is down" in why
    async with living(shop, 0) as backend:
        assert shown()[0] == "running", "its slot was leased again: the one who wrote that is gone"
        write(1, backend)
        state, why = shown()
        assert state == "outage"
        assert "the gateway is down" in why
        write(0, backend)
        assert shown()[0] == "running", "of the time before the epoch was raised"
        assert json.loads(processor(shop.folder, "status", "shop.toml", "--json").stdout)["slots"] == [0]
    assert shown()[0] == "no owner"


ROUND = """
    INSERT INTO pruning (consumer, owner, began_at, page, finished_at, deleted)
    VALUES ($1, 'me', now() - interval '20 minutes', 7, now() - interval '10 minutes', 3)
"""


def replay_is_made(shop: Shop, name: str, state: str) -> None:
    """Over ten offsets of each partition, four of them done."""
    ranges = [
        Range(Partition(shop.topic, number), "id", 2, source, 5, 15, 15, 15)
        for number, source in enumerate(shop.sources)
    ]
    plan, made = {"mode": "re-emit"}, {"at": "2025-01-01T00:00:00+00:00", "event": "created"}
    ledger = f"{shop.consumer}.replay.{name}"
    sql.connected(shop.database, lambda db: replays.create(db, shop.consumer, name, ledger, plan, made, ranges))
    sql.execute(shop.database, "UPDATE ledger SET next_offset = 9 WHERE consumer = $1", ledger)
    sql.execute(shop.database, "UPDATE replays SET state = $2 WHERE name = $1", name, state)


def test_status_shows_how_far_messages_are_forgotten_and_the_replays_that_have_not_ended(shop: Shop) -> None:
    def shown() -> list[str]:
        return processor(shop.folder, "status", "shop.toml").stdout.splitlines()

    def found() -> dict[str, Any]:
        parsed: dict[str, Any] = json.loads(processor(shop.folder, "status", "shop.toml", "--json").stdout)
        return parsed

    nothing = found()
    assert nothing["retention"] == {"span_seconds": 7 * 86_400.0, "round": None, "watermarks": []}
    assert nothing["replays"] == []
    assert shown()[-1] == "retention: 7 d, no round yet"

    sql.execute(shop.database, "INSERT INTO forgotten (partition_id, below) VALUES ($1, 0), ($2, 120)", *shop.sources)
    sql.execute(shop.database, ROUND, shop.consumer)
    for name, state in (("a", "active"), ("b", "paused"), ("c", "cancelled"), ("d", "finished")):
        replay_is_made(shop, name, state)
    assert shown()[-4:] == [
        "retention: 7 d, last round ended 10 m ago, 3 rows deleted",
        f"forgotten below: {shop.topic}[1] 120",
        "replay a: re-emit, active, 8 of 20 offsets",
        "replay b: re-emit, paused, 8 of 20 offsets",
    ]
    told = found()
    assert [(one["partition"], one["below"]) for one in told["retention"]["watermarks"]] == [(0, 0), (1, 120)]
    assert told["retention"]["round"]["deleted"] == 3
    assert told["replays"][0] == {"name": "a", "state": "active", "mode": "re-emit", "offsets_done": 8, "offsets": 20}
    assert {one["topic"] for one in told["partitions"]} == {shop.topic}
    assert len(told["partitions"]) == 2, "a replay's positions are none of the live service"

    shop.row("a", 1)  # the inbox has a page
    sql.execute(shop.database, "UPDATE pruning SET finished_at = NULL, page = 0")
    assert "retention: 7 d, a round began 20 m ago and is at page 0 of 1" in shown()
    with (shop.folder / "shop.toml").open("a") as file:
        file.write("\n[retention]\ndays = 0\n")
    sql.execute(shop.database, "DELETE FROM pruning")
    assert "retention: off" in shown()


async def test_scripts_can_wait_until_all_is_done_or_the_lag_is_small(bench: MakeBench) -> None:
    b = bench()
    b.send(messages("m0", "m1"))

    async def wait(what: str, *arguments: str) -> tuple[int, str]:
        done = await processor_beside(PROJECT, "status", str(b.config), "--wait", what, *arguments)
        return done.returncode, done.stderr

    assert await wait("lag<3", "--timeout", "20") == (0, "")
    code, said = await wait("lag<2", "--timeout", "0")
    assert (code, said) == (1, "error: not lag<2 within 0 s: lag 2\n")
    code, said = await wait("ready", "--timeout", "0")
    assert (code, said) == (1, f"error: not ready within 0 s: {b.input}[0] unowned\n")
    code, said = await wait("drained", "--timeout", "0.1")
    assert (code, said) == (1, f"error: not drained within 0.1 s: {b.input}[0] lag 2\n")
    async with b.running():
        assert await wait("ready", "--timeout", "30") == (0, "")
        assert await wait("drained", "--timeout", "30") == (0, "")
    assert (await wait("soon"))[0] == 2


async def test_wait_ends_with_exit_code_3_where_only_an_operator_can_help(bench: MakeBench) -> None:
    b = bench({"T": "rejected", "A": "apply"}, partitions=2, failure={"policy": "halt"})
    async with b.running():
        b.send(messages("m0"))
        await b.until(lambda: troubled(b), "halted")
        done = await processor_beside(PROJECT, "status", str(b.config), "--wait", "drained", "--timeout", "60")
    assert done.returncode == 3
    assert f"error: {b.input}[0] is halted: {b.input}:0:0: " in done.stderr


async def test_status_on_a_terminal_says_in_words_who_joins_what_waits_and_what_is_down(
    bench: MakeBench, database: str
) -> None:
    b = bench({"T": "reject_or_apply"}, partitions=2, failure={"policy": "park-key"})
    with Proxy(postgres_frame, sql.port_of(database)) as proxy:
        url = {"PROCESSOR_DATABASE__URL": sql.with_port(database, proxy.port)}
        watch = ("status", str(b.config), "--watch", "--interval", "0.2")
        with terminal(PROJECT, *watch, **url) as screen:
            await asyncio.to_thread(screen.wait_for, f"{b.input}[0] unowned: no process has begun with it yet")
            async with b.running(environ=url):
                joined = "1 process (slots 0) 1 member in the group"
                await asyncio.to_thread(screen.wait_for, f"{b.input}[1] │ running", joined)
                async with b.running():
                    joined = "2 processes (slots 0, 1) 2 members in the group"
                    await asyncio.to_thread(screen.wait_for, joined)
                    handlers.failing.add("m0")
                    b.send(messages("m0", "m1"))
                    parked = f"{b.input}[0]: 1 message waits behind one that failed: `processor dlq list`"
                    await asyncio.to_thread(screen.wait_for, parked, "inbox: 1 failed")
                await asyncio.to_thread(screen.wait_for, "1 process (slots 0)", f"{b.input}[1] │ running")
            proxy.close()
            down = "Postgres is unreachable: "
            await asyncio.to_thread(screen.wait_for, down, "is the server running", f"{b.input}[1] │ unknown")
            assert screen.interrupt() == 130


def test_status_without_any_server_says_so_twice_and_exits_with_1(shop: Shop) -> None:
    gone = {
        "PROCESSOR_DATABASE__URL": "postgresql://x@127.0.0.1:1/x",
        "PROCESSOR_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1",
    }
    done = processor(shop.folder, "status", "shop.toml", environ=gone)
    assert done.returncode == 1
    first, second = done.stderr.splitlines()
    assert "database.url: cannot connect to " in first
    assert "the brokers at 127.0.0.1:1 do not answer: " in second


def test_status_on_a_pipe_is_lines_with_tabs_and_one_line_of_json_if_asked(shop: Shop) -> None:
    shop.row("a", 1)
    shop.row("b", 2, status="parked", parked_key=b"k")
    done = processor(shop.folder, "status", "shop.toml")
    assert (done.returncode, done.stderr) == (0, "")
    head, titles, first, *_ = done.stdout.splitlines()
    assert head.split("  ")[0] == shop.consumer
    cells = dict(zip(titles.split("\t"), first.split("\t"), strict=True))
    assert (cells["partition"], cells["state"]) == (f"{shop.topic}[0]", "no owner")
    assert (cells["failed"], cells["parked"], cells["epoch"], cells["owner"]) == ("1", "1", "1", "me")
    (line,) = processor(shop.folder, "status", "shop.toml", "-o", "jsonl").stdout.splitlines()
    found = json.loads(line)
    assert {status: one["rows"] for status, one in found["inbox"].items()} == {"failed": 1, "parked": 1}
    assert found["consumer"] == shop.consumer


def test_watch_on_a_pipe_goes_on_line_by_line_until_it_is_interrupted(shop: Shop) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
    watch = [sys.executable, "-m", "processor", "status", "shop.toml", "--watch", "--interval", "0.1", "-o", "jsonl"]
    with subprocess.Popen(watch, cwd=shop.folder, env=environ, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert first["at"] < second["at"]
    assert first["partitions"] == second["partitions"]
