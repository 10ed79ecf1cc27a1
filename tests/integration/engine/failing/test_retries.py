"""Tries, delays, time-outs and the end of the line: what is tried again, how often, and who has to wait for it."""

from __future__ import annotations

import asyncio
import json
from datetime import datetime
from itertools import pairwise, repeat
from operator import sub
from statistics import median
from typing import Any

import pytest

from processor import Reject, Retry, Unavailable
from processor.errors import Halt, SetupError
from tests.conftest import Topics
from tests.integration.conftest import MakeBench
from tests.support import handlers, letters
from tests.support.bench import Bench, Sent
from tests.support.logs import events

THREE = {"attempts": 3, "first_delay_ms": 20, "max_delay_ms": 50}
FULL_BATCH = {"linger_ms": 200}


def numbered(count: int, *, prefix: str = "m", partition: int = 0, type_: str = "T") -> list[Sent]:
    return [Sent({"what": f"{prefix}{n}"}, type=type_, id=f"{prefix}{n}", partition=partition) for n in range(count)]


async def outcome(bench: Bench, id_: str) -> tuple[str, int, str | None]:
    """Status, attempts, and the class of the error if there is one."""
    row = (await bench.inbox())[id_]
    return row["status"], row["attempts"], json.loads(row["error"])["class"] if row["error"] else None


# --- tries and delays ---


async def test_retry_waits_as_long_as_the_handler_asks_for(bench: MakeBench, logs: list[Any]) -> None:
    b = bench("planned", retry=THREE)
    handlers.plans["m0"] = iter([Retry("not yet", after=0.8)])
    b.send(numbered(3))
    await b.run_until_done()
    first, second = handlers.moments["m0"]
    assert 0.79 < second - first < 5
    assert await b.effects() == ["m0", "m1", "m2"]
    assert await outcome(b, "m0") == ("completed", 2, None)
    (retried,) = events(logs, "message_retried", message_id="m0")
    assert retried["seconds"] == pytest.approx(0.8, abs=0.1)


@pytest.mark.parametrize("handler", ["planned", "planned_after_writing"])
@pytest.mark.parametrize(
    ("error", "tries", "kind"),
    [
        (Retry("not yet"), 3, "transient"),
        (TimeoutError("nobody answers"), 3, "transient"),
        (RuntimeError("a bug"), 3, "bug"),
        (Reject("bad"), 1, "poison"),
    ],
    ids=["Retry", "TimeoutError", "RuntimeError", "Reject"],
)
async def test_message_is_tried_as_often_as_its_error_allows_and_then_fails(
    bench: MakeBench, logs: list[Any], handler: str, error: Exception, tries: int, kind: str
) -> None:
    b = bench(handler, retry=THREE, batch=FULL_BATCH)
    handlers.plans["m1"] = repeat(error)
    b.send(numbered(4))
    await b.run_until_done()
    assert await outcome(b, "m1") == ("failed", tries, kind)
    assert sorted(set(handlers.attempts["m1"])) == list(range(1, tries + 1))
    if handler == "planned":
        assert handlers.calls["m1"] == tries
    assert await b.effects() == ["m0", "m2", "m3"]
    row = (await b.inbox())["m1"]
    assert row["first_failed_at"] <= row["finished_at"]
    assert (row["first_failed_at"] == row["finished_at"]) == (tries == 1)
    assert [event["event"] for event in json.loads(row["history"])] == ["retried"] * (tries - 1) + ["failed"]
    assert len(events(logs, "message_retried", message_id="m1")) == tries - 1
    assert len(events(logs, "message_failed", message_id="m1")) == 1


async def test_message_that_succeeds_at_its_last_try_is_as_good_as_any(bench: MakeBench) -> None:
    b = bench("planned_after_writing", retry=THREE)
    handlers.plans["m1"] = iter([RuntimeError("one"), Retry("two")])
    b.send(numbered(3))
    await b.run_until_done()
    assert await b.effects() == ["m0", "m1", "m2"]
    assert [value["what"] for _, value, _ in b.outputs()] == ["m0", "m1", "m2"]
    row = (await b.inbox())["m1"]
    assert (row["status"], row["attempts"], row["error"], row["payload"]) == ("completed", 3, None, None)


async def test_batch_handler_that_fails_is_tried_again_and_its_culprit_fails_alone(bench: MakeBench) -> None:
    b = bench("apply_many", retry=THREE, batch=FULL_BATCH)
    handlers.failing.add("m13")
    b.send(numbered(40))
    await b.run_until_done()
    assert await b.effects() == [f"m{n}" for n in range(40) if n != 13]
    assert await outcome(b, "m13") == ("failed", 3, "bug")
    assert {row["attempts"] for id_, row in (await b.inbox()).items() if id_ != "m13"} == {1}


async def test_attempts_survive_a_restart(bench: MakeBench) -> None:
    b = bench("planned", retry={**THREE, "attempts": 4})
    errors = [Retry("soon", after=0.01), Retry("much later", after=3600), RuntimeError("three"), RuntimeError("four")]
    handlers.plans["m0"] = iter(errors)
    b.send(numbered(2))

    async def tried_twice() -> bool:
        rows = await b.inbox()
        return "m0" in rows and rows["m0"]["attempts"] == 2

    async with b.running():
        await b.until(tried_twice, "two attempts on record")
    assert (await b.inbox())["m0"]["status"] == "pending"
    await b.run_until_done()
    assert handlers.attempts["m0"] == [1, 2, 3, 4]
    assert await outcome(b, "m0") == ("failed", 4, "bug")
    assert await b.effects() == ["m1"]


async def test_types_may_have_tries_of_their_own(bench: MakeBench) -> None:
    b = bench({"T": "planned", "U": {"call": "planned", "retry": THREE}})
    for id_ in ("t0", "u0"):
        handlers.plans[id_] = repeat(RuntimeError("a bug"))
    b.send(numbered(1, prefix="t") + numbered(1, prefix="u", type_="U"))
    await b.run_until_done()
    assert await outcome(b, "t0") == ("failed", 1, "bug")
    assert await outcome(b, "u0") == ("failed", 3, "bug")


async def test_type_without_inbox_has_its_tries_too(bench: MakeBench) -> None:
    b = bench({"T": {"call": "planned", "inbox": False}}, retry=THREE)
    handlers.plans["m0"] = repeat(RuntimeError("a bug"))
    handlers.plans["m1"] = iter([RuntimeError("only once")])
    b.send(numbered(3))
    await b.run_until_done()
    assert await b.effects() == ["m1", "m2"]
    assert handlers.calls == {"m0": 3, "m1": 2, "m2": 1}
    assert [row["status"] for row in (await b.inbox()).values()] == ["failed"]


async def test_next_try_comes_as_soon_as_was_logged_and_not_half_a_second_later(
    bench: MakeBench, logs: list[Any]
) -> None:
    b = bench("planned", partitions=2, retry={**THREE, "attempts": 20})
    handlers.plans["m0"] = iter([Retry("not yet", after=0.02)] * 11)
    b.send(numbered(1))
    await b.run_until_done()
    waits = [later - earlier for earlier, later in pairwise(handlers.moments["m0"])]
    logged = [event["seconds"] for event in events(logs, "partition_held")]
    assert median(map(sub, waits, logged)) < 0.25, (
        "less than a broker takes to answer, by default, when nothing comes in"
    )


# --- what has no text, or is no Exception ---


class Speechless(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


@pytest.mark.parametrize("handler", ["planned", "planned_after_writing", "planned_many"])
async def test_exception_that_cannot_say_what_it_is_fails_only_its_message(bench: MakeBench, handler: str) -> None:
    b = bench(handler, retry=THREE)
    handlers.plans["m1"] = repeat(Speechless())
    b.send(numbered(3))
    await b.run_until_done()
    assert await b.effects() == ["m0", "m2"]
    assert await outcome(b, "m1") == ("failed", 3, "bug")
    assert "Speechless" in json.loads((await b.inbox())["m1"]["error"])["message"]


class Exotic(BaseException):
    """As some libraries have them."""


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), Exotic("odd")], ids=lambda e: type(e).__name__)
async def test_handler_that_raises_what_is_no_exception_fails_its_message_like_any_other(
    bench: MakeBench, error: BaseException, concurrency: int
) -> None:
    b = bench("planned", retry=THREE, concurrency=concurrency)
    handlers.plans["m1"] = repeat(error)
    b.send(numbered(3))
    await b.run_until_done()
    assert await b.effects() == ["m0", "m2"]
    assert await outcome(b, "m1") == ("failed", 3, "bug")
    evidence = json.loads((await b.inbox())["m1"]["error"])
    assert f"tests.support.handlers:planned raised {type(error).__name__}" in evidence["message"]
    assert "in planned" in evidence["traceback"]


async def test_batch_handler_that_calls_sys_exit_fails_only_the_message_at_fault(bench: MakeBench) -> None:
    b = bench("planned_many", retry=THREE)
    handlers.plans["m2"] = repeat(SystemExit("bye"))
    b.send(numbered(5))
    await b.run_until_done()
    assert await b.effects() == ["m0", "m1", "m3", "m4"]
    assert await outcome(b, "m2") == ("failed", 3, "bug")


async def test_effect_that_calls_sys_exit_fails_its_message_like_any_other(bench: MakeBench) -> None:
    b = bench({"T": {"call": "planned", "effect": True}}, retry=THREE)
    handlers.plans["m1"] = repeat(SystemExit(0))
    b.send(numbered(3))
    await b.run_until_done()
    assert await b.effects() == ["m0", "m2"]
    assert await outcome(b, "m1") == ("failed", 3, "bug")


async def test_system_exit_can_be_classed_by_the_configuration(bench: MakeBench) -> None:
    b = bench("planned", retry=THREE, failure={"classes": {"builtins:SystemExit": "poison"}})
    handlers.plans["m0"] = repeat(SystemExit(3))
    b.send(numbered(2))
    await b.run_until_done()
    assert await outcome(b, "m0") == ("failed", 1, "poison")


async def test_type_without_inbox_that_is_cut_off_in_its_second_try_leaves_no_row_behind(bench: MakeBench) -> None:
    b = bench({"T": {"call": "stall", "inbox": False}}, retry=THREE)
    handlers.plans["m0"] = iter([RuntimeError("the first time")])
    handlers.failing.add("m0")
    b.send(numbered(1))

    async def cut_off() -> None:
        async with b.running():
            await b.until(handlers.gate.is_set, "the second try")
            b.tasks[0].cancel()

    with pytest.raises(asyncio.CancelledError):
        await cut_off()
    assert handlers.calls == {"m0": 2}
    handlers.failing.clear()
    await b.run_until_done()
    assert await b.effects() == ["m0"]
    assert await b.inbox() == {}


# --- classes ---


async def test_sqlstates_and_exceptions_are_classed_as_the_configuration_says(bench: MakeBench) -> None:
    classes = {
        "P07": "poison",
        "23514": "transient",
        "tests.support.handlers:Odd": "poison",
        "asyncpg:UniqueViolationError": "poison",
    }
    b = bench({"T": "planned", "S": "raise_state"}, retry=THREE, failure={"classes": classes})
    handlers.plans["odd0"] = repeat(handlers.Odd("odd"))
    handlers.plans["kind0"] = repeat(handlers.OddOfAKind("odd too"))
    states = {"P0777": "P0777", "P0001": "P0001", "23514": "23514", "23502": "23502", "23505": "23505"}
    b.send([Sent({"what": id_, "state": id_, "times": 99}, type="S", id=id_) for id_ in states])
    b.send([*numbered(1, prefix="odd"), *numbered(1, prefix="kind"), *numbered(1, prefix="good")])
    await b.run_until_done()
    found = {id_: await outcome(b, id_) for id_ in await b.inbox()}
    assert found == {
        "P0777": ("failed", 1, "poison"),  # by the beginning of its state
        "P0001": ("failed", 3, "bug"),
        "23514": ("failed", 3, "transient"),  # the configuration goes before what is built in
        "23502": ("failed", 1, "poison"),  # built in
        "23505": ("failed", 1, "poison"),  # by its exception
        "odd0": ("failed", 1, "poison"),
        "kind0": ("failed", 1, "poison"),  # a subclass
        "good0": ("completed", 1, None),
    }
    assert await b.effects() == ["good0"]
    assert json.loads((await b.inbox())["P0777"]["error"])["sqlstate"] == "P0777"


async def test_exception_classed_as_outage_counts_no_attempt(bench: MakeBench, logs: list[Any]) -> None:
    b = bench("planned", failure={"classes": {"tests.support.handlers:Odd": "outage"}})
    handlers.plans["m0"] = iter([handlers.Odd("down"), Unavailable("still down"), handlers.Odd("down again")])
    b.send(numbered(2))
    await b.run_until_done()
    assert await b.effects() == ["m0", "m1"]
    assert await outcome(b, "m0") == ("completed", 1, None)
    assert handlers.attempts["m0"] == [1, 1, 1, 1]
    assert events(logs, "partition_held", partition=f"{b.input}[0]")
    assert events(logs, "message_failed") == []


# --- time-outs ---


@pytest.mark.parametrize("of_the_type", [False, True], ids=["for all", "for the type"])
async def test_handler_that_takes_too_long_is_tried_again(bench: MakeBench, of_the_type: bool) -> None:
    if of_the_type:
        b = bench({"T": {"call": "hang_at_first", "timeout_ms": 300}}, retry=THREE)
    else:
        b = bench("hang_at_first", retry=THREE, failure={"timeout_ms": 300})
    b.send(numbered(1))
    await b.run_until_done()
    assert await b.effects() == ["m0"]
    assert await outcome(b, "m0") == ("completed", 2, None)


async def test_handler_that_always_takes_too_long_fails_as_transient(bench: MakeBench) -> None:
    b = bench({"T": "planned", "H": "slow"}, failure={"timeout_ms": 200}, retry={**THREE, "attempts": 2})
    b.send([*numbered(1), *numbered(1, prefix="h", type_="H"), Sent({"what": "m1"}, id="m1")])
    await b.run_until_done()
    assert await b.effects() == ["m0", "m1"]
    assert await outcome(b, "h0") == ("failed", 2, "transient")


# --- who has to wait ---


async def test_partition_in_backoff_does_not_hold_up_the_other_one(bench: MakeBench, logs: list[Any]) -> None:
    b = bench("planned", partitions=2, retry=THREE)
    handlers.plans["m1"] = iter([Retry("in an hour", after=3600)])
    b.send(numbered(5) + numbered(200, prefix="other", partition=1))
    async with b.running():
        await b.until(lambda: events(logs, "message_retried", message_id="m1"), "the first try")
        await b.done_with(1)
        b.send([Sent({"what": "more"}, id="more", partition=1)])
        await b.done_with(1)
        assert b.committed().get(0, 0) <= 1
    written = await b.effects()
    assert [what for what in written if what.startswith("m") and what != "more"] == ["m0"], "the rest keeps its order"
    assert len(written) == 1 + 200 + 1


async def test_process_stays_in_its_group_while_a_partition_waits(bench: MakeBench, logs: list[Any]) -> None:
    """Longer than a group waits for a member that does not poll, or one without a heartbeat."""
    impatient = {"heartbeat.interval.ms": 300, "max.poll.interval.ms": 1_500}
    b = bench("planned", retry=THREE, kafka={"session_timeout_ms": 1_500, "consumer": impatient})
    handlers.plans["m0"] = iter([Retry("in a while", after=4.0)])
    b.send(numbered(2))
    await b.run_until_done()
    assert await b.effects() == ["m0", "m1"]
    assert len(events(logs, "partitions_assigned")) == 1
    assert events(logs, "partitions_lost") == []


# --- the end of the line ---


async def test_policy_halt_stops_the_partition_at_the_message_until_it_is_mended(
    bench: MakeBench, logs: list[Any]
) -> None:
    b = bench("planned", partitions=2, failure={"policy": "halt"})
    handlers.plans["m2"] = repeat(RuntimeError("a bug"))
    b.send(numbered(5) + numbered(50, prefix="other", partition=1))
    async with b.running():
        await b.until(lambda: events(logs, "partition_halted", partition=f"{b.input}[0]"), "the halt")
        b.send([Sent({"what": "more"}, id="more", partition=1)])
        await b.done_with(1)
        assert b.committed().get(0) == 2
    (halted,) = events(logs, "partition_halted")
    assert f"{b.input}:0:2" in halted["reason"], "it says which message"
    assert halted["log_level"] in ("error", "critical")
    handlers.plans.clear()
    await b.run_until_done()
    written = await b.effects()
    assert [what for what in written if what[1:].isdigit()] == [f"m{n}" for n in range(5)]
    assert len(written) == 5 + 50 + 1
    assert {row["status"] for row in (await b.inbox()).values()} == {"completed"}


async def test_process_with_nothing_left_but_halted_partitions_ends_with_the_reason(bench: MakeBench) -> None:
    b = bench("planned", failure={"policy": "halt"})
    handlers.plans["m2"] = repeat(Reject("bad"))
    b.send(numbered(5))
    with pytest.raises(Halt, match=f"{b.input}:0:2: bad"):
        await b.run_until_done()
    assert await b.effects() == ["m0", "m1"]
    assert b.committed() == {0: 2}


async def test_undecodable_message_halts_its_partition_too(bench: MakeBench) -> None:
    b = bench("planned", failure={"policy": "halt"})
    b.send([*numbered(2), Sent(b"{", id="bad"), Sent({"what": "m3"}, id="m3")])
    with pytest.raises(Halt, match=f"{b.input}:0:2"):
        await b.run_until_done()
    assert await b.effects() == ["m0", "m1"]


TOO_MANY = [
    pytest.param({"budget_consecutive": 5}, "BBBBBBBBBBBBBBBBBBBBBBBBBBBBBB", "budget_consecutive", id="in a row"),
    pytest.param({"budget_percent": 50, "budget_window": 10}, "BBG" * 20, "budget_percent", id="of the last"),
]


@pytest.mark.parametrize(("budget", "pattern", "reason"), TOO_MANY)
async def test_too_many_failures_halt_the_partition_instead_of_emptying_it(
    bench: MakeBench, logs: list[Any], budget: dict[str, int], pattern: str, reason: str
) -> None:
    b = bench("planned", partitions=2, failure=budget, batch={"max_messages": 10})
    for number, letter in enumerate(pattern):
        if letter == "B":
            handlers.plans[f"m{number}"] = repeat(Reject("bad"))
    b.send(numbered(len(pattern)) + numbered(50, prefix="other", partition=1))
    async with b.running():
        await b.until(lambda: events(logs, "partition_halted", partition=f"{b.input}[0]"), "the halt")
        b.send([Sent({"what": "more"}, id="more", partition=1)])
        await b.done_with(1)
    (halted,) = events(logs, "partition_halted")
    assert reason in halted["reason"]
    assert halted["log_level"] in ("error", "critical")
    failed = [id_ for id_, row in (await b.inbox()).items() if row["status"] == "failed"]
    assert len(failed) <= 10
    assert b.committed().get(0, 0) <= 20

    await b.run_until_done(PROCESSOR_FAILURE__BUDGET_CONSECUTIVE="1000", PROCESSOR_FAILURE__BUDGET_PERCENT="100")
    statuses = {id_: row["status"] for id_, row in (await b.inbox()).items()}
    assert {id_ for id_, status in statuses.items() if status == "failed"} == set(handlers.plans)
    assert len(statuses) == len(pattern) + 50 + 1
    assert len(await b.effects()) == pattern.count("G") + 50 + 1


async def test_some_failures_are_ordinary(bench: MakeBench, logs: list[Any]) -> None:
    b = bench("planned", failure={"budget_consecutive": 5, "budget_percent": 50, "budget_window": 10})
    pattern = "GBGBG" * 12
    for number, letter in enumerate(pattern):
        if letter == "B":
            handlers.plans[f"m{number}"] = repeat(Reject("bad"))
    b.send(numbered(len(pattern)))
    await b.run_until_done()
    assert len(await b.effects()) == pattern.count("G")
    assert events(logs, "partition_halted") == []


# --- dead letters ---


async def test_missing_dead_letter_topic_is_found_at_start(bench: MakeBench, topics: Topics) -> None:
    b = bench("planned", failure={"dead_letter_topic": "{topic}.{consumer}.dlq"})
    name = f"{b.input}.{b.consumer}.dlq"
    handlers.plans["m0"] = repeat(Reject("bad"))
    b.send(numbered(2))
    with pytest.raises(SetupError, match=name.replace(".", r"\.")):
        await b.run_until_done()
    assert await b.inbox() == {}
    topics(name, exact=True)
    await b.run_until_done()
    assert [letter.notes["message-id"] for letter in letters.read(b.bootstrap_servers, name)] == ["m0"]


async def test_dead_letter_tells_of_all_tries(bench: MakeBench, topics: Topics) -> None:
    dead = topics("dead")
    b = bench("planned", retry=THREE, failure={"dead_letter_topic": dead})
    handlers.plans["m0"] = repeat(RuntimeError("x" * 5000))
    (place,) = b.send([Sent({"what": "m0"}, b"\x00k", id="m0", headers=[("a", b"1"), ("a", None)])])
    await b.run_until_done()
    (letter,) = letters.read(b.bootstrap_servers, dead)
    assert (letter.key, letter.value) == (b"\x00k", b'{"what": "m0"}')
    assert letter.headers == [("a", b"1"), ("a", None), ("type", b"T"), ("message-id", b"m0")]
    notes = letter.notes
    assert (notes["class"], notes["reason"], notes["attempts"]) == ("bug", "handler_error", "3")
    assert (notes["exception"], len(notes["error"])) == ("RuntimeError", 1000)
    assert (notes["topic"], notes["partition"], notes["offset"]) == (b.input, "0", str(place.offset))
    assert datetime.fromisoformat(notes["first-failure"]) < datetime.fromisoformat(notes["last-failure"])
    assert b.outputs() == []


async def test_dead_letter_that_would_be_too_large_goes_without_its_payload(bench: MakeBench, topics: Topics) -> None:
    dead = topics("dead")
    b = bench("planned", failure={"dead_letter_topic": dead})
    handlers.plans["m0"] = repeat(Reject("y" * 1000))
    large = json.dumps({"what": "x" * 999_000}).encode()
    b.send([Sent(large, b"k", id="m0"), Sent({"what": "m1"}, id="m1")])
    await b.run_until_done()
    (letter,) = letters.read(b.bootstrap_servers, dead)
    assert (letter.key, letter.value) == (b"k", None)
    assert letter.notes["payload"] == "omitted: in the inbox row"
    assert (await b.inbox())["m0"]["payload"] == large
    assert await b.effects() == ["m1"]


async def test_repeat_that_fails_in_a_known_way_is_no_dead_letter_and_one_that_fails_otherwise_is(
    bench: MakeBench, topics: Topics
) -> None:
    """A repeat is tried anew, whatever became of the one before."""
    dead = topics("dead")
    b = bench("planned", failure={"dead_letter_topic": dead})
    errors = [Reject("first"), Reject("second"), KeyError("third"), ValueError("fourth"), Reject("fifth")]
    handlers.plans["m0"] = iter(errors)
    for _ in range(6):
        b.send(numbered(1))
        await b.run_until_done()
    found = [letter.notes["error"] for letter in letters.read(b.bootstrap_servers, dead)]
    assert found == ["first", "KeyError: 'third'", "ValueError: fourth"]
    row = (await b.inbox())["m0"]
    assert (row["status"], row["attempts"]) == ("completed", 6)
    assert len(json.loads(row["history"])) == len(errors)
    assert await b.effects() == ["m0"]


async def test_repeats_in_one_batch_that_fail_in_the_same_way_are_one_dead_letter(
    bench: MakeBench, topics: Topics
) -> None:
    dead = topics("dead")
    b = bench("planned", retry=THREE, failure={"dead_letter_topic": dead}, batch=FULL_BATCH)
    handlers.plans["m0"] = repeat(RuntimeError("never works"))
    b.send([*numbered(2), *numbered(2), *numbered(1)])
    await b.run_until_done()
    assert [letter.notes["message-id"] for letter in letters.read(b.bootstrap_servers, dead)] == ["m0"]
    assert handlers.calls["m0"] == 3 * THREE["attempts"]
