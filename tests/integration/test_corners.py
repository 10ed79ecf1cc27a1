"""Where two rare things meet: a retry and a failure of its key, an outage and a restart, a halt and a wait."""

from __future__ import annotations

import asyncio
import hashlib
import json
import struct
import zlib
from collections.abc import Sequence
from contextlib import suppress
from itertools import repeat
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from processor import Reject, Retry, Unavailable
from processor.engine.engine import Engine
from processor.errors import BatchAborted, Halt
from processor.handling import registry
from processor.kafka.assignment import Assignment
from processor.kafka.reader import PartitionReader
from processor.messages.decode import Decoder
from processor.messages.message import Partition
from processor.postgres.sqlstates import StatementTimedOut
from processor.settings.load import load
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import SECONDS, Bench, Sent
from tests.support.command import processor
from tests.support.deployments import PROJECT
from tests.support.logs import events
from tests.support.readings import reading

THREE = {"attempts": 3, "first_delay_ms": 20, "max_delay_ms": 50}
SOON = {"lease_ms": 300, "reap_ms": 100}


def messages(*names: str, key: bytes | None = b"k", type_: str = "T", partition: int = 0) -> list[Sent]:
    """Each writes its own name."""
    return [Sent({"what": name}, key, type_, name, partition=partition) for name in names]


async def in_one_batch(bench: Bench, records: Sequence[Sent], gate: str = "gate") -> None:
    """Send these so that they are processed together: they come in while the engine is busy with one before them."""
    handlers.gate.clear()
    bench.send([Sent({"what": gate}, b"gate", "G", gate)])
    await bench.until(lambda: handlers.calls[gate], "busy")
    bench.send(records)
    source = bench.engines[0].reader
    await bench.until(lambda: source.buffered == len(records), "all of them read")
    handlers.gate.set()


async def statuses(bench: Bench) -> dict[str, str]:
    """Of all that is not completed, by message id."""
    return {id_: row["status"] for id_, row in (await bench.inbox()).items() if row["status"] != "completed"}


async def redrive(bench: Bench, *arguments: str) -> tuple[int, str]:
    done = await asyncio.to_thread(processor, PROJECT, "dlq", "redrive", str(bench.config), *arguments)
    return done.returncode, done.stdout + done.stderr


# --- order within a key ---


async def test_message_in_retry_whose_key_is_parked_meanwhile_waits_and_is_redriven_in_order(bench: MakeBench) -> None:
    """K3's write is refused only when it is flushed, after K4 has asked to be tried again."""
    b = bench({"T": "planned", "G": "hold_up"}, failure={"policy": "park-key"}, retry=THREE)
    await b.execute("ALTER TABLE effects ADD CONSTRAINT good CHECK (what <> 'K3')")
    handlers.plans["K4"] = iter([Retry("not yet", after=0.05)])
    async with b.running():
        await in_one_batch(b, messages("K3", "K4", "K5", key=b"K"))
        await b.done()
        assert await statuses(b) == {"K3": "failed", "K4": "parked", "K5": "parked"}
        rows = await b.inbox()
        assert {rows[id_]["parked_key"] for id_ in ("K3", "K4", "K5")} == {hashlib.sha256(b"K").digest()}
        assert json.loads(rows["K4"]["payload"]) == {"what": "K4"}
        assert handlers.calls["K4"] == 1
        await b.execute("ALTER TABLE effects DROP CONSTRAINT good")
        code, told = await redrive(b, "--key", "K")
        assert code == 0, told
        await b.done()
    assert await b.effects() == ["K3", "K4", "K5"]
    assert await statuses(b) == {}


async def test_collision_parks_its_key_for_the_rest_of_its_batch(bench: MakeBench) -> None:
    b = bench({"T": "apply", "G": "hold_up"}, failure={"policy": "park-key"})
    async with b.running():
        b.send(messages("K1", key=b"K"))
        await b.done()
        another = Sent({"what": "another"}, b"K", id="K1")
        await in_one_batch(b, [another, *messages("K2", "K3", key=b"K"), *messages("A1", key=b"A")])
        await b.done()
        assert await b.effects() == ["K1", "A1"]
        collided = f"K1~{b.place(2)}"
        assert await statuses(b) == {collided: "failed", "K2": "parked", "K3": "parked"}
        assert json.loads((await b.inbox())[collided]["error"])["reason"] == "collision"
        code, told = await redrive(b, "--key", "K")
        assert (code, f"a collision keeps its key parked: {collided}" in told) == (1, True), told
        assert await b.effects() == ["K1", "A1"]
        code, told = await redrive(b, "--id", collided, "--despite-collision")
        assert code == 0, told
        await b.done()
    assert await b.effects() == ["K1", "A1", "another", "K2", "K3"]


# --- queued writes ---


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_refused_write_that_surfaces_in_a_neighbour_who_swallows_it_costs_nobody_a_row(
    bench: MakeBench, concurrency: int
) -> None:
    """In a batch that is sent carefully, because one before it had a refused write."""
    b = bench({"T": "queue", "R": "read_swallow_and_write", "G": "hold_up"}, retry=THREE, concurrency=concurrency)
    await b.execute("ALTER TABLE effects ADD UNIQUE (what), ADD CHECK (what <> 'bad')")
    await b.execute("INSERT INTO effects (what) VALUES ('taken')")
    async with b.running():
        b.send(messages("bad"))
        await b.done()
        assert len(b.engines[0]._loop._careful) == 1, "with the one statement that was refused"
        await in_one_batch(
            b,
            [
                *messages("m0", key=b"0"),
                Sent({"what": "taken"}, b"1", id="m1"),
                *messages("m2", key=b"2"),
                *messages("m3", key=b"3", type_="R"),
                *messages("m4", key=b"4"),
            ],
        )
        await b.done()
    assert sorted(await b.effects()) == ["m0", "m2", "m3", "m4", "taken"]
    assert await statuses(b) == {"bad": "failed", "m1": "failed"}
    row = (await b.inbox())["m1"]
    assert (row["attempts"], json.loads(row["error"])["class"]) == (3, "bug")


@pytest.mark.parametrize("careful", [False, True], ids=["at first", "carefully"])
async def test_flush_that_is_cut_off_by_an_impatient_reader_costs_nobody_a_row(bench: MakeBench, careful: bool) -> None:
    b = bench({"T": "queue", "R": "read_impatiently_and_write", "G": "hold_up"}, retry=THREE)
    await b.execute(
        "ALTER TABLE effects ADD CHECK (what <> 'bad')",
        """CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN PERFORM pg_sleep(0.5); RETURN NEW; END $$""",
        "CREATE TRIGGER dawdle BEFORE INSERT ON effects FOR EACH ROW WHEN (NEW.what = 'm1') EXECUTE FUNCTION dawdle()",
    )
    async with b.running():
        if careful:
            b.send(messages("bad"))
            await b.done()
        await in_one_batch(b, [*messages("m0", "m1", "m2"), *messages("m3", type_="R"), *messages("m4")])
        await b.done()
    assert await b.effects() == ["m0", "m1", "m2", "m3", "m4"]
    assert await statuses(b) == ({"bad": "failed"} if careful else {})


async def test_who_fails_while_its_write_is_on_the_way_takes_it_back_all_the_same(bench: MakeBench) -> None:
    """A neighbour's read sends it, carefully, and Postgres has not answered yet."""
    b = bench(
        {"T": "queue", "Q": "queue_until_read", "R": "read_and_swallow"},
        retry={"attempts": 1},
        concurrency=4,
        batch={"max_messages": 1000, "linger_ms": 300},
    )
    await b.execute(
        "ALTER TABLE effects ADD CHECK (what <> 'bad')",
        """CREATE FUNCTION dawdle() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN PERFORM pg_sleep(1); RETURN NEW; END $$""",
        "CREATE TRIGGER dawdle BEFORE INSERT ON effects FOR EACH ROW WHEN (NEW.what = 'm1') EXECUTE FUNCTION dawdle()",
    )
    handlers.failing.add("m1")
    async with b.running():
        b.send(messages("bad"))
        await b.done()
        b.send([*messages("m0", key=b"0"), *messages("m1", key=b"1", type_="Q"), *messages("m2", key=b"2", type_="R")])
        on_the_way = "SELECT FROM pg_stat_activity WHERE wait_event = 'PgSleep' AND datname = current_database()"
        await b.until(lambda: b.rows(on_the_way), "the write on its way")
        handlers.gate.set()
        await b.done()
    assert await b.effects() == ["m0"]
    assert await statuses(b) == {"bad": "failed", "m1": "failed"}


# --- recovery ---


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


# --- who counts as dead ---


async def cut_off(bench: Bench, times: int) -> None:
    """Start an engine, and end it as the service does when the time for stopping is over; so many times."""
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


async def test_outage_that_outlasts_the_lease_again_and_again_quarantines_nobody(bench: MakeBench) -> None:
    """One process from beginning to end; its own lease runs out while its partition waits."""
    b = bench({"T": {"call": "stall", "effect": True}}, failure={"quarantine_after": 2}, effects=SOON)
    handlers.plans["m0"] = repeat(Unavailable("down", after=1.0), 4)
    b.send(messages("m0", "m1"))
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


# --- effects ---


@pytest.mark.parametrize("keys", [(b"k", b"k"), (b"one", b"two"), (None, None)], ids=["one key", "two keys", "no key"])
async def test_duplicate_in_the_same_batch_makes_no_second_call(
    bench: MakeBench, keys: tuple[bytes | None, bytes | None]
) -> None:
    b = bench({"T": {"call": "stall", "effect": True}, "G": "hold_up"}, concurrency=4)
    async with b.running():
        twice = [Sent({"what": "m0"}, key, id="m0") for key in keys]
        await in_one_batch(b, [*twice, *messages("m1")])
        await b.done()
    assert (handlers.calls["m0"], handlers.calls["m1"]) == (1, 1)
    assert sorted(await b.effects()) == ["m0", "m1"]
    assert await statuses(b) == {}


@pytest.mark.parametrize("lease", ["-1 second", "1 second"], ids=["expired", "about to expire"])
async def test_lease_of_a_handler_that_is_no_effect_any_more_is_waited_for_and_taken_over(
    bench: MakeBench, lease: str
) -> None:
    """Nobody reaps where there are no effects."""
    b = bench("queue")
    b.send(messages("m0"))
    await b.run_until_done()
    leased = messages("m1", "m2")
    (checksum,) = struct.unpack("i", struct.pack("I", zlib.crc32(leased[0].payload() or b"")))
    await b.execute(
        f"""INSERT INTO inbox (key, source, "offset", payload_hash, status, attempts, starts, message_id, type,
                               record_key, lease_owner, lease_until)
            SELECT inbox_key(consumer, 'm1'), source, 1, {checksum}, 'processing', 0, 1, 'm1', 'T', 'k', 'the dead',
                   now() + '{lease}' FROM ledger"""
    )
    b.send(leased)
    await b.run_until_done()
    assert await b.effects() == ["m0", "m1", "m2"]
    assert await statuses(b) == {}


# --- partitions that wait ---


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


# --- policy halt ---


@pytest.mark.parametrize("before", [True, False], ids=["with an earlier batch", "with its own batch"])
async def test_collision_halts_its_partition(bench: MakeBench, before: bool) -> None:
    b = bench({"T": "apply", "G": "hold_up"}, failure={"policy": "halt"})
    rest = [*messages("m1"), Sent({"what": "another"}, id="m0"), *messages("m3")]

    async def run_into_it() -> None:
        async with b.running():
            if before:
                b.send(messages("m0"))
                await b.done()
            await in_one_batch(b, rest if before else [*messages("m0"), *rest])
            await b.done()

    with pytest.raises(Halt, match="m0"):
        await run_into_it()
    with pytest.raises(Halt, match="m0"):
        await b.run_until_done()
    assert await b.effects() == ["m0", "m1"]
    assert b.committed() == {0: 3}
    assert await statuses(b) == {}


async def finish_the_other_partition(bench: Bench, name: str) -> None:
    bench.send(messages(name, partition=1))
    await bench.done_with(1)


async def test_partition_that_is_halted_after_another_of_its_messages_was_to_wait_stays_halted(
    bench: MakeBench, logs: list[Any]
) -> None:
    """m0's write is refused only when it is flushed, after m1 has asked to be tried again."""
    b = bench({"T": "planned", "G": "hold_up"}, partitions=2, failure={"policy": "halt"}, retry=THREE)
    await b.execute("ALTER TABLE effects ADD CONSTRAINT good CHECK (what <> 'm0')")
    handlers.plans["m1"] = iter([Retry("not yet", after=0.0)])
    async with b.running():
        await b.until(lambda: len(b.engines[0].reader.fetching()) == 2, "both partitions")
        await in_one_batch(b, messages("m0", "m1", "m2"))
        await b.until(lambda: events(logs, "partition_halted"), "the halt")
        for n in range(3):
            await finish_the_other_partition(b, f"other{n}")
        assert b.committed()[0] == 1
    assert events(logs, "partition_held") == []
    assert len(events(logs, "partition_halted")) == 1
    await b.execute("ALTER TABLE effects DROP CONSTRAINT good")
    await b.run_until_done()
    assert [what for what in await b.effects() if what.startswith("m")] == ["m0", "m1", "m2"]
    assert await statuses(b) == {}


@pytest.mark.parametrize("error", [Retry, Unavailable])
async def test_partition_with_a_message_to_wait_for_after_it_was_halted_stays_halted_and_skips_nothing(
    bench: MakeBench, logs: list[Any], error: type[Retry | Unavailable]
) -> None:
    """What cannot be decoded is known before anything of the batch is tried."""
    b = bench({"T": "planned", "G": "hold_up"}, partitions=2, failure={"policy": "halt"}, retry=THREE)
    handlers.plans["m0"] = iter([error("not yet", after=0.0)])
    async with b.running():
        await b.until(lambda: len(b.engines[0].reader.fetching()) == 2, "both partitions")
        await in_one_batch(b, [*messages("m0"), Sent(b"{", id="m1"), *messages("m2")])
        await b.until(lambda: events(logs, "partition_halted"), "the halt")
        for n in range(3):
            await finish_the_other_partition(b, f"other{n}")
            b.send(messages(f"m{n + 3}"))
    assert events(logs, "partition_held") == [], "whoever waits goes on after a while"
    assert [what for what in await b.effects() if what.startswith("m")] in ([], ["m0"])
    assert b.committed()[0] <= 2
    await b.run_until_done(PROCESSOR_FAILURE__POLICY="dead-letter")
    assert [what for what in await b.effects() if what.startswith("m")] == ["m0", "m2", "m3", "m4", "m5"]
    assert await statuses(b) == {"m1": "failed"}


async def test_message_at_which_a_partition_is_halted_is_not_passed_when_one_before_it_is_tried_again(
    bench: MakeBench, logs: list[Any]
) -> None:
    """m1 fails while m0's write is only queued; that one is refused afterwards, and asks for another try."""
    slowly = {"attempts": 3, "first_delay_ms": 1_000, "max_delay_ms": 1_000}
    b = bench({"T": "planned", "G": "hold_up"}, partitions=2, failure={"policy": "halt"}, retry=slowly)
    await b.execute(
        "CREATE UNIQUE INDEX good ON effects (what) WHERE what = 'm0'", "INSERT INTO effects (what) VALUES ('m0')"
    )
    handlers.plans["m1"] = repeat(Reject("bad"))
    async with b.running():
        await b.until(lambda: len(b.engines[0].reader.fetching()) == 2, "both partitions")
        await in_one_batch(b, messages("m0", "m1", "m2"))
        await b.until(lambda: events(logs, "partition_halted"), "the halt")
        await b.until(lambda: events(logs, "message_retried", message_id="m0"), "the other one's first try")
        await b.execute("DROP INDEX good", "DELETE FROM effects")
        for n in range(3):
            await finish_the_other_partition(b, f"other{n}")
            b.send(messages(f"m{n + 3}"))
    assert events(logs, "partition_held") == [], "whoever waits goes on after a while"
    assert [what for what in await b.effects() if what.startswith("m")] in ([], ["m0"])
    assert b.committed()[0] <= 2
    handlers.plans.clear()
    await b.run_until_done()
    assert [what for what in await b.effects() if what.startswith("m")] == [f"m{n}" for n in range(6)]
    assert await statuses(b) == {}
