"""Ends that are no deaths: orderly stops, outages and halts quarantine nobody."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from itertools import repeat
from typing import Any

import pytest

from processor import Retry, Unavailable
from processor.engine.engine import Engine
from processor.errors import Halt
from processor.handling import registry
from processor.settings.load import load
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import SECONDS, Bench
from tests.support.logs import events
from tests.support.scenes import SOON, THREE, messages, statuses


async def cut_off(bench: Bench, times: int) -> None:
    """Start an engine, and end it as the service does when the time for stopping is over; several times."""
    settings = load(bench.config, {})
    routes = registry.load(settings)
    for _ in range(times):
        handlers.gate.clear()
        running = asyncio.create_task(Engine(settings, routes).run())
        async with asyncio.timeout(SECONDS):
            await handlers.gate.wait()
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


@pytest.mark.parametrize("effect", [False, True], ids=["in retry", "effect"])
async def test_attempts_that_are_cut_off_at_the_end_of_orderly_stops_quarantine_nobody(
    bench: MakeBench, effect: bool
) -> None:
    b = bench(
        {"T": {"call": "stall", "effect": effect}},
        failure={"quarantine_after": 2},
        retry={**THREE, "attempts": 9},
        effects=SOON,
    )
    handlers.failing.add("m0")
    handlers.plans["m0"] = iter([Retry("so that it has a row", after=0.0)])
    b.send(messages("m0", "m1"))
    await cut_off(b, 4)
    handlers.failing.clear()
    await b.run_until_done()
    assert await statuses(b) == {}
    assert await b.effects() == ["m0", "m1"]


@pytest.mark.parametrize("effect", [False, True], ids=["in retry", "effect"])
async def test_orderly_restarts_during_an_outage_quarantine_nobody(
    bench: MakeBench, logs: list[Any], effect: bool
) -> None:
    b = bench(
        {"T": {"call": "stall", "effect": effect}},
        failure={"quarantine_after": 2},
        retry={**THREE, "attempts": 9},
        effects=SOON,
    )
    b.send(messages("m0", "m1"))
    handlers.plans["m0"] = iter([Retry("so that it has a row", after=0.0), *repeat(Unavailable("down", after=0.0), 99)])
    for restart in range(4):
        handlers.calls.clear()
        async with b.running():
            await b.until(lambda: handlers.calls["m0"] >= 2 or events(logs, "message_failed"), "two calls")
        assert events(logs, "message_failed") == [], f"after {restart} restarts"
    assert await b.effects() == []
    handlers.plans.clear()
    await b.run_until_done()
    assert await statuses(b) == {}
    assert await b.effects() == ["m0", "m1"]


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_outage_that_outlasts_the_lease_again_and_again_quarantines_nobody(
    bench: MakeBench, concurrency: int
) -> None:
    """One process from beginning to end; its own leases run out while its partition waits."""
    b = bench(
        {"T": {"call": "stall", "effect": True}},
        failure={"quarantine_after": 2},
        effects=SOON,
        concurrency=concurrency,
    )
    handlers.plans["m0"] = repeat(Unavailable("down", after=1.0), 4)
    b.send([*messages("m0", key=b"one"), *messages("m1", key=b"two")])
    await b.run_until_done()
    assert await statuses(b) == {}
    assert await b.effects() == ["m0", "m1"]


@pytest.mark.parametrize("effect", [False, True], ids=["in retry", "effect"])
async def test_message_that_halts_its_partition_at_every_start_is_tried_again_once_it_is_mended(
    bench: MakeBench, effect: bool
) -> None:
    b = bench(
        {"T": {"call": "stall", "effect": effect}},
        failure={"quarantine_after": 2, "policy": "halt"},
        retry={**THREE, "attempts": 2},
        effects=SOON,
    )
    handlers.plans["m0"] = repeat(RuntimeError("a bug"))
    b.send(messages("m0", "m1"))
    for _ in range(4):
        with pytest.raises(Halt, match="a bug"):
            await b.run_until_done()
    handlers.plans.clear()
    await b.run_until_done()
    assert await statuses(b) == {}
    assert await b.effects() == ["m0", "m1"]
