"""Partitions that wait: what ends the waiting, and what does not count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncpg
import pytest

from processor import Retry, Unavailable
from processor.postgres.sqlstates import StatementTimedOut
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.logs import events
from tests.support.scenes import THREE, in_one_batch, messages, redrive, statuses


async def test_process_is_ready_again_when_another_one_takes_the_partition_with_the_outage(
    bench: MakeBench, logs: list[Any], tmp_path: Path
) -> None:
    """Both partitions had an outage and are being tried again when one of them moves."""
    b = bench({"T": "down_at_first", "G": "hold_up"}, partitions=2, kafka={"revoke_timeout_ms": 1_000})
    first, second = tmp_path / "first", tmp_path / "second"
    async with b.running(environ={"PROCESSOR_RUN__READY_FILE": str(first)}):
        await b.until(first.exists, "ready")
        await b.until(lambda: len(b.engines[0].reader.fetching()) == 2, "both partitions")
        await in_one_batch(b, [*messages("m0"), *messages("m1", partition=1)])
        handlers.gate.clear()
        await b.until(lambda: max(handlers.calls["m0"], handlers.calls["m1"]) == 2, "tried again")
        assert len(events(logs, "partition_held")) == 2
        assert not first.exists()
        ready = len(events(logs, "partition_ready"))
        async with b.running(environ={"PROCESSOR_RUN__READY_FILE": str(second)}):
            await b.until(lambda: b.engines[0].reader.owned(), "a partition for the second process")
            handlers.gate.set()
            await b.until(lambda: len(events(logs, "partition_ready")) > ready, "the partition taken")
            await b.done()
            await b.until(first.exists, "the first one ready again")
            await b.until(second.exists, "the second one ready")
    assert sorted(await b.effects()) == ["m0", "m1"]


@pytest.mark.parametrize("handler", ["planned", "planned_after_writing"])
@pytest.mark.parametrize("error", [Unavailable, Retry])
@pytest.mark.parametrize("cause", [TimeoutError, StatementTimedOut, asyncpg.DeadlockDetectedError])
async def test_handler_that_says_what_a_passing_error_means_is_called_once_per_try(
    bench: MakeBench, logs: list[Any], handler: str, error: type[Unavailable | Retry], cause: type[Exception]
) -> None:
    b = bench(handler, retry=THREE)
    raised = error("later", after=0.05)
    raised.__cause__ = cause("no answer")
    handlers.plans["m0"] = iter([raised, raised])
    b.send(messages("m0"))
    await b.run_until_done()
    assert handlers.calls["m0"] == 3
    assert len(events(logs, "partition_held")) == 2, "no call without the wait that was asked for"
    assert await b.effects() == ["m0"]
    assert (await b.inbox())["m0"]["attempts"] == (3 if error is Retry else 1)


async def test_redriving_more_broken_messages_than_may_fail_in_a_row_halts_nothing(
    bench: MakeBench, logs: list[Any]
) -> None:
    budget = {"budget_consecutive": 3, "budget_percent": 60, "budget_window": 10}
    b = bench("reject_or_apply", failure=budget)
    bad = [f"bad{n}" for n in range(12)]
    handlers.failing |= set(bad)
    b.send([one for n, name in enumerate(bad) for one in messages(name, f"good{n}")])
    async with b.running():
        await b.done()
        code, told = await redrive(b, "--all")
        assert code in (0, 1), told
        await b.done()
        b.send(messages("more"))
        await b.done()
    assert events(logs, "partition_halted") == []
    assert await statuses(b) == dict.fromkeys(bad, "failed")
    assert {row["attempts"] for id_, row in (await b.inbox()).items() if id_ in bad} == {2}
    assert (await b.effects())[-1] == "more"
