"""A redrive that is killed in the middle and run again, with the service running: each message is applied once."""

from __future__ import annotations

import asyncio
import signal
import sys

import pytest

from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.command import processor_beside
from tests.support.deployments import PROJECT

MESSAGES = 300
RATE = 100  # a second: time to kill it


async def until_applied(bench: Bench, count: int) -> None:
    async def applied() -> bool:
        return len(await bench.effects()) >= count

    await bench.until(applied, f"{count} messages applied")


@pytest.mark.parametrize("inbox", [True, False], ids=["a collision", "without inbox"])
async def test_message_with_the_longest_id_can_be_redriven(bench: MakeBench, inbox: bool) -> None:
    """Its row has more in its name than the id: where the message came from."""
    b = bench({"T": {"call": "reject_or_apply", "inbox": inbox}})
    id_ = "x" * 512
    handlers.failing.add("w1")
    (*_, place) = b.send([Sent({"what": what}, id=id_) for what in ("w0", "w1")])
    name = f"{id_}~{b.place(place.offset)}"
    async with b.running():
        await b.done()
        handlers.failing.clear()
        done = await processor_beside(PROJECT, "dlq", "redrive", str(b.config), "--id", name, "--despite-collision")
        assert (done.returncode, done.stdout) == (0, "1 sent: 1 completed, 0 failed again\n"), done.stderr
    assert await b.effects() == ["w0", "w1"]


@pytest.mark.parametrize(
    ("identity", "inbox"),
    [(["header:message-id"], True), (["offset"], True), (["header:message-id"], False)],
    ids=["by header", "by offset", "without inbox"],
)
async def test_redrive_killed_in_the_middle_and_run_again_applies_each_message_once(
    bench: MakeBench, identity: list[str], inbox: bool
) -> None:
    b = bench(
        {"T": {"call": "reject_or_apply", "inbox": inbox}},
        partitions=2,
        message={"id": identity},
        failure={"budget_consecutive": MESSAGES},
    )
    names = [f"w{n}" for n in range(MESSAGES)]
    handlers.failing |= set(names)
    b.send(Sent({"what": what}, what.encode(), id=what, partition=n % 2) for n, what in enumerate(names))
    await b.run_until_done()
    assert await b.effects() == []
    handlers.failing.clear()

    redrive = [sys.executable, "-m", "processor", "dlq", "redrive", str(b.config), "--all"]
    async with b.running():
        doomed = await asyncio.create_subprocess_exec(*redrive, "--rate", str(RATE), cwd=PROJECT)
        await until_applied(b, MESSAGES // 10)
        doomed.kill()
        assert await doomed.wait() == -signal.SIGKILL
        assert len(await b.effects()) < MESSAGES, "this was to happen in the middle"
        again = await asyncio.create_subprocess_exec(*redrive, cwd=PROJECT)
        assert await again.wait() == 0
        await until_applied(b, MESSAGES)
        await b.done()
    assert sorted(await b.effects()) == sorted(names)
    published = [value["what"] for _, value, _ in await asyncio.to_thread(b.outputs)]
    assert sorted(published) == sorted(names)
    assert {row["status"] for row in (await b.inbox()).values()} <= {"completed"}
