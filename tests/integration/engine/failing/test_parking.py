"""Policy park-key: the messages of a key are processed in order or not at all, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import datetime
from typing import Any

import pytest

from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.command import processor
from tests.support.deployments import PROJECT

PARK = {"policy": "park-key"}
PARTITIONS = 2


def numbered(key: str, first: int, last: int, partition: int = 0) -> list[Sent]:
    """Messages K1, K2, … of one key, each of which writes its own name."""
    return [
        Sent({"what": f"{key}{n}"}, key.encode(), id=f"{key}{n}", partition=partition) for n in range(first, last + 1)
    ]


def names(key: str, first: int, last: int) -> list[str]:
    return [f"{key}{n}" for n in range(first, last + 1)]


async def applied(bench: Bench, key: str) -> list[str]:
    """What was written for one key, in order; what was told about it must be the same."""
    written = [what for what in await bench.effects() if what.startswith(key)]
    told = [value["what"] for _, value, _ in await asyncio.to_thread(bench.outputs)]
    assert [what for what in told if what.startswith(key)] == written
    return written


async def unfinished(bench: Bench) -> dict[str, str]:
    """Message ids and statuses of all that is not completed."""
    return {name: row["status"] for name, row in (await bench.inbox()).items() if row["status"] != "completed"}


async def dlq(bench: Bench, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`processor dlq …` as an operator runs it, while the service goes on."""
    return await asyncio.to_thread(processor, PROJECT, "dlq", command, str(bench.config), *arguments)


async def redrive(bench: Bench, key: str) -> None:
    done = await dlq(bench, "redrive", "--key", key)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(params=["apply", "planned"], ids=["written before it fails", "only queued before it fails"])
async def parked(request: pytest.FixtureRequest, bench: MakeBench) -> Bench:
    """K1 and K2 are done, K3 has failed, K4 to K6 wait; other keys, on the same partition and on another, went on."""
    b = bench(request.param, partitions=PARTITIONS, failure=PARK, batch={"max_messages": 5})
    break_(request.param, "K3")
    b.send(numbered("K", 1, 4) + numbered("A", 1, 5) + numbered("K", 5, 6) + numbered("A", 6, 9))
    b.send(numbered("B", 1, 9, partition=1))
    await b.run_until_done()
    return b


def break_(handler: str, id_: str) -> None:
    if handler == "apply":
        handlers.failing.add(id_)
    else:
        handlers.plans[id_] = _always()


def mend() -> None:
    handlers.failing.clear()
    handlers.plans.clear()


def _always() -> Any:
    while True:
        yield RuntimeError("told to fail")


@asynccontextmanager
async def traffic(bench: Bench, key: str, first: int) -> AsyncIterator[list[int]]:
    """Messages of the key, one after the other as fast as the broker takes them, and as many of another key."""
    sent: list[int] = []
    stop = asyncio.Event()

    async def flow() -> None:
        number = first
        while not stop.is_set():
            await asyncio.to_thread(bench.send, numbered(key, number, number) + numbered("C", number, number))
            sent.append(number)
            number += 1

    flowing = asyncio.create_task(flow())
    try:
        yield sent
    finally:
        stop.set()
        await flowing


async def test_later_messages_of_a_failed_key_wait_while_other_keys_go_on(parked: Bench) -> None:
    assert await applied(parked, "K") == names("K", 1, 2)
    assert await applied(parked, "A") == names("A", 1, 9)
    assert await applied(parked, "B") == names("B", 1, 9)
    assert await unfinished(parked) == {"K3": "failed", "K4": "parked", "K5": "parked", "K6": "parked"}
    rows = await parked.inbox()
    for name in names("K", 3, 6):
        assert (rows[name]["parked_key"], rows[name]["record_key"]) == (hashlib.sha256(b"K").digest(), b"K")
        assert json.loads(rows[name]["payload"]) == {"what": name}
    assert [handlers.calls[name] for name in names("K", 4, 6)] == [0, 0, 0]
    assert json.loads(rows["K3"]["error"])["class"] == "bug"


async def test_parked_keys_survive_a_restart(parked: Bench) -> None:
    mend()  # also what would succeed now must wait for its turn
    parked.send(numbered("K", 7, 8) + numbered("A", 10, 12))
    await parked.run_until_done()
    assert await applied(parked, "K") == names("K", 1, 2)
    assert await applied(parked, "A") == names("A", 1, 12)
    assert await unfinished(parked) == {"K3": "failed"} | dict.fromkeys(names("K", 4, 8), "parked")


async def test_parked_keys_survive_a_rebalance(parked: Bench) -> None:
    mend()
    async with parked.running(engines=2):
        parked.send(numbered("K", 7, 7) + numbered("B", 10, 12, partition=1))
        await parked.done()
    assert await applied(parked, "K") == names("K", 1, 2)
    assert await applied(parked, "B") == names("B", 1, 12)
    assert (await unfinished(parked))["K7"] == "parked"


async def test_redriven_key_is_applied_in_order_while_its_traffic_continues(parked: Bench) -> None:
    mend()
    async with parked.running():
        async with traffic(parked, "K", first=7) as sent:
            await parked.until(lambda: len(sent) >= 3, "traffic")
            await redrive(parked, "K")
            so_far = len(sent)
            await parked.until(lambda: len(sent) >= so_far + 3, "traffic after the redrive")
        await parked.done()
    assert await applied(parked, "K") == names("K", 1, sent[-1])
    assert await applied(parked, "C") == names("C", 7, sent[-1])
    assert await unfinished(parked) == {}
    assert {row["parked_key"] for row in (await parked.inbox()).values()} == {None}
    assert {handlers.calls[name] for name in names("K", 4, sent[-1])} == {1}


async def test_redrive_without_the_service_waits_for_the_next_start(parked: Bench) -> None:
    mend()
    done = await dlq(parked, "redrive", "--key", "K", "--no-wait")
    assert done.returncode == 0, done.stdout + done.stderr
    parked.send(numbered("K", 7, 9))
    async with parked.running():
        await parked.done()
        await redrive(parked, "K")  # what came behind the key's failure before it was mended
        await parked.done()
    assert await applied(parked, "K") == names("K", 1, 9)
    assert await unfinished(parked) == {}


async def test_key_is_free_again_after_its_redrive(parked: Bench) -> None:
    mend()
    async with parked.running():
        await redrive(parked, "K")
        parked.send(numbered("K", 7, 9))
        await parked.done()
    assert await applied(parked, "K") == names("K", 1, 9)
    assert await unfinished(parked) == {}


async def test_head_that_fails_again_keeps_the_others_parked(parked: Bench) -> None:
    async with parked.running():
        done = await dlq(parked, "redrive", "--key", "K")
        assert done.returncode != 0, "the operator must hear about it"
        await parked.done()
    assert await applied(parked, "K") == names("K", 1, 2)
    assert await unfinished(parked) == {"K3": "failed", "K4": "parked", "K5": "parked", "K6": "parked"}
    head = (await parked.inbox())["K3"]
    assert head["attempts"] == 2
    assert head["redriven_at"] is None
    # The service may be faster than the command that notes what it has sent.
    history = sorted(json.loads(head["history"]), key=lambda event: datetime.fromisoformat(event["at"]))
    assert [event["event"] for event in history] == ["failed", "redriven", "failed"]
    mend()
    async with parked.running():
        await redrive(parked, "K")
        await parked.done()
    assert await applied(parked, "K") == names("K", 1, 6)


async def test_second_failure_behind_a_redriven_head_stops_the_key_there(parked: Bench) -> None:
    mend()
    handlers.failing.add("K5")
    handlers.plans["K5"] = _always()
    async with parked.running():
        await dlq(parked, "redrive", "--key", "K")
        await parked.done()
        assert await applied(parked, "K") == names("K", 1, 4)
        assert await unfinished(parked) == {"K5": "failed", "K6": "parked"}
        mend()
        await redrive(parked, "K")
        await parked.done()
    assert await applied(parked, "K") == names("K", 1, 6)
    assert await unfinished(parked) == {}


async def test_discarding_the_head_lets_the_rest_go(parked: Bench) -> None:
    async with parked.running():
        done = await dlq(parked, "discard", "--id", "K3", "--reason", "not needed", "--by", "ada", "--yes")
        assert done.returncode == 0, done.stdout + done.stderr
        await redrive(parked, "K")
        parked.send(numbered("K", 7, 8))
        await parked.done()
    assert await applied(parked, "K") == ["K1", "K2", *names("K", 4, 8)]
    assert await unfinished(parked) == {"K3": "discarded"}
    event = json.loads((await parked.inbox())["K3"]["history"])[-1]
    assert (event["event"], event["by"], event["reason"]) == ("discarded", "ada", "not needed")


async def test_messages_without_a_key_hold_up_nobody(bench: MakeBench) -> None:
    b = bench(failure=PARK)
    handlers.failing.add("m1")
    b.send([Sent({"what": f"w{n}"}, None, id=f"m{n}") for n in range(4)])
    await b.run_until_done()
    assert await b.effects() == ["w0", "w2", "w3"]
    assert await unfinished(b) == {"m1": "failed"}


async def test_undecodable_message_parks_its_key_too(bench: MakeBench) -> None:
    b = bench(failure=PARK)
    b.send([*numbered("K", 1, 1), Sent(b"{", b"K", id="K2"), *numbered("K", 3, 4), *numbered("A", 1, 2)])
    await b.run_until_done()
    assert await applied(b, "K") == ["K1"]
    assert await applied(b, "A") == names("A", 1, 2)
    assert await unfinished(b) == {"K2": "failed", "K3": "parked", "K4": "parked"}


async def test_key_of_ten_kilobytes_is_parked_like_any_other(bench: MakeBench) -> None:
    b = bench(failure=PARK)
    key = random.Random(1).randbytes(10_000)  # nothing that Postgres could compress
    handlers.failing.add("m0")
    b.send([Sent({"what": f"m{n}"}, key, id=f"m{n}") for n in range(3)] + numbered("A", 1, 1))
    await b.run_until_done()
    assert await unfinished(b) == {"m0": "failed", "m1": "parked", "m2": "parked"}
    mend()
    async with b.running():
        b.send([Sent({"what": "m3"}, key, id="m3")])
        await b.done()
        assert (await unfinished(b))["m3"] == "parked"
        done = await dlq(b, "redrive", "--all")
        assert done.returncode == 0, done.stdout + done.stderr
        await b.done()
    assert await b.effects() == ["A1", *names("m", 0, 3)]
    assert await unfinished(b) == {}


@pytest.mark.parametrize("restart", [False, True], ids=["goes on", "is restarted"])
async def test_message_that_fails_in_two_partitions_holds_up_its_key_in_both(bench: MakeBench, restart: bool) -> None:
    b = bench(partitions=PARTITIONS, failure=PARK)
    handlers.failing.add("K1")
    async with b.running():
        for partition in range(PARTITIONS):
            b.send(numbered("K", 1, 1, partition))
            await b.done()
        if not restart:
            b.send([*numbered("K", 2, 2), *numbered("K", 3, 3, partition=1), *numbered("A", 1, 1, partition=1)])
            await b.done()
    if restart:
        b.send([*numbered("K", 2, 2), *numbered("K", 3, 3, partition=1), *numbered("A", 1, 1, partition=1)])
        await b.run_until_done()
    assert await b.effects() == ["A1"]
    assert await unfinished(b) == {"K1": "failed", "K2": "parked", "K3": "parked"}
    async with b.running():
        done = await dlq(b, "redrive", "--all")
        assert (done.returncode, done.stderr.count("failed again: K1")) == (1, 1), done.stdout + done.stderr
        mend()
        done = await dlq(b, "redrive", "--partition", "1")
        assert (done.returncode, done.stderr.count("keeps its key parked: K1")) == (1, 1), done.stdout + done.stderr
        assert await b.effects() == ["A1"]
        await redrive(b, "K")
        b.send([*numbered("K", 4, 4), *numbered("K", 5, 5, partition=1)])
        await b.done()
    written = await b.effects()
    assert written[:2] == ["A1", "K1"]
    assert sorted(written[2:]) == names("K", 2, 5)
    assert await unfinished(b) == {}


async def test_message_that_waits_in_two_partitions_keeps_its_place_in_both(bench: MakeBench) -> None:
    """Behind a failed one in each, K3 comes in both; K4 waits for it in the partition where it came second."""
    b = bench(partitions=PARTITIONS, failure=PARK)
    handlers.failing |= {"K1", "K2", "K3"}
    async with b.running():
        b.send(numbered("K", 1, 1))
        b.send(numbered("K", 2, 2, partition=1))
        await b.done()
        b.send(numbered("K", 3, 3))
        await b.done()
        b.send(numbered("K", 3, 4, partition=1))
        await b.done()
        assert await unfinished(b) == {"K1": "failed", "K2": "failed", "K3": "parked", "K4": "parked"}
        handlers.failing -= {"K1", "K2"}
        done = await dlq(b, "redrive", "--key", "K")
        assert (done.returncode, done.stderr.count("failed again: K3")) == (1, 1), done.stdout + done.stderr
        assert sorted(await b.effects()) == ["K1", "K2"]
        assert await unfinished(b) == {"K3": "failed", "K4": "parked"}
        mend()
        await redrive(b, "K")
    assert (await b.effects())[2:] == ["K3", "K4"]
    assert await unfinished(b) == {}


async def test_repeated_deliveries_of_what_waits_change_nothing(parked: Bench) -> None:
    parked.send(numbered("K", 4, 6) + numbered("K", 1, 2) + numbered("K", 5, 5))
    await parked.run_until_done()
    assert await applied(parked, "K") == names("K", 1, 2)
    assert set((await unfinished(parked)).items()) >= {("K4", "parked"), ("K5", "parked"), ("K6", "parked")}
    mend()
    async with parked.running():
        await redrive(parked, "K")
        await parked.done()
    assert await applied(parked, "K") == names("K", 1, 6)
    assert await unfinished(parked) == {}
