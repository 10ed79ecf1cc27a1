"""Partitions that are about to be read again."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from processor import Retry
from processor.errors import BatchAborted, ConnectionLost
from processor.handling import registry
from processor.kafka.assignment import Assignment
from processor.kafka.reader import PartitionReader
from processor.messages.decode import Decoder
from processor.messages.message import Partition
from processor.settings.load import load
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.logs import events
from tests.support.readings import reading
from tests.support.scenes import THREE, messages


async def test_partition_that_is_about_to_be_read_counts_as_active(bench: MakeBench) -> None:
    b = bench()
    settings = load(b.config, {})
    source = PartitionReader(
        settings, Decoder(settings, registry.load(settings).types)
    )  # never started: nobody serves its requests
    assignment = Assignment(Partition(b.input, 0))
    source._assignments[assignment.partition] = assignment
    assert not assignment.active
    source.begin(assignment, reading(0, b.input), 0)
    assert (assignment.active, source.fetching()) == (True, [])
    source.suspend([assignment])
    assert not assignment.active
    source._consumer.close()


async def test_output_of_a_partition_that_is_about_to_be_read_again_survives_a_failed_publication(
    bench: MakeBench, logs: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """m0 is committed, m1 waits for its next try; that is over, but nobody reads yet when publishing m0 fails."""
    b = bench("planned", retry=THREE, batch={"max_messages": 1})
    handlers.plans["m1"] = iter([Retry("not yet", after=0.0)])
    async with b.running():
        (engine,) = b.engines
        source = engine.reader
        await b.until(source.fetching, "ready")
        publish, serve_requests = engine.parts.producer.publish, source._serve_requests
        stalled = failed = False

        async def fail_once(outgoing: Any, *arguments: Any) -> None:
            nonlocal failed
            if outgoing and not failed:
                failed = True
                await b.until(lambda: source._to_begin and not source.fetching(), "about to read")
                raise BatchAborted("as told")
            await publish(outgoing, *arguments)

        def serve_unless_stalled() -> None:
            if not stalled:
                serve_requests()

        monkeypatch.setattr(engine.parts.producer, "publish", fail_once)
        monkeypatch.setattr(source, "_serve_requests", serve_unless_stalled)
        stalled = True
        b.send(messages("m0", "m1"))
        await b.until(lambda: events(logs, "starting_over"), "the way back")
        stalled = False
        await b.done()
    assert [value["what"] for _, value, _ in b.outputs()] == ["m0", "m1"]
    assert await b.effects() == ["m0", "m1"]


async def test_hold_that_runs_out_during_a_recovery_reads_nothing_before_that_is_done(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read under the old epoch meanwhile, records could be passed over or sent twice."""
    b = bench("planned", retry=THREE)
    handlers.plans["m0"] = iter([Retry("not yet", after=3.0)])
    async with b.running():
        parts, go_on = b.engines[0].parts, asyncio.Event()
        await b.until(parts.reader.fetching, "ready")
        open_producer = parts.producer.open

        async def open_later() -> None:
            await go_on.wait()
            await open_producer()

        monkeypatch.setattr(parts.producer, "open", open_later)
        b.send(messages("m0"))
        (owned,) = parts.partitions.owned()
        await b.until(lambda: owned in parts.pauses, "held")
        assert parts.recoveries.start_over(ConnectionLost("of no partition in particular"), ()) == [owned]
        await b.until(lambda: owned not in parts.pauses, "the hold has run out")
        assert not owned.assignment.active
        go_on.set()
        await b.done()
    assert (handlers.calls["m0"], await b.effects()) == (2, ["m0"])
