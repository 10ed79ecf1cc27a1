"""The engine on a real broker and a real Postgres: what becomes of messages, good and bad."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

from processor import Retry
from processor.errors import SetupError
from tests.conftest import Topics, unique
from tests.integration.conftest import MakeBench
from tests.support import handlers, letters
from tests.support.bench import Bench, Sent
from tests.support.logs import events


def numbered(count: int, **fields: Any) -> list[Sent]:
    return [Sent({"what": f"w{n}"}, id=f"m{n}", key=f"k{n}".encode(), **fields) for n in range(count)]


def said(bench: Bench) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs()]


# --- the six classics ---


async def test_same_message_three_times_is_applied_once_and_answered_once(bench: MakeBench) -> None:
    b = bench()
    b.send([Sent({"what": "once"}, id="m") for _ in range(2)])
    await b.run_until_done()
    b.send([Sent({"what": "once"}, id="m")])
    await b.run_until_done()
    assert await b.effects() == ["once"]
    assert said(b) == ["once"]
    assert handlers.calls["m"] == 1
    assert [row["status"] for row in (await b.inbox()).values()] == ["completed"]


async def test_duplicate_leaves_the_stored_result_as_it_is(bench: MakeBench) -> None:
    b = bench("answer")
    for _ in range(3):
        b.send([Sent({"what": "x"}, id="m")])
        await b.run_until_done()
    row = (await b.inbox())["m"]
    assert json.loads(row["result"]) == {"answer": 1}
    assert [value for _, value, _ in b.outputs()] == [{"answer": 1}]


async def test_failure_is_not_cached_and_the_next_delivery_succeeds(bench: MakeBench) -> None:
    b = bench()
    handlers.failing.add("m")
    b.send([Sent({"what": "x"}, id="m")])
    await b.run_until_done()
    row = (await b.inbox())["m"]
    error = json.loads(row["error"])
    assert (row["status"], row["attempts"]) == ("failed", 1)
    assert error["reason"] == "handler_error"
    assert "told to fail on m" in error["message"]
    assert "handlers.py" in error["traceback"]
    assert json.loads(row["payload"]) == {"what": "x"}
    assert (await b.effects(), b.outputs()) == ([], [])
    handlers.failing.clear()
    b.send([Sent({"what": "x"}, id="m")])
    await b.run_until_done()
    row = (await b.inbox())["m"]
    assert (row["status"], row["attempts"], row["error"], row["payload"]) == ("completed", 2, None, None)
    assert (await b.effects(), said(b)) == (["x"], ["x"])


async def test_concurrent_duplicates_on_two_partitions_and_two_engines_are_applied_once(bench: MakeBench) -> None:
    b = bench(partitions=2, batch={"max_messages": 20})
    for partition in (0, 1):
        b.send(
            [
                Sent({"what": f"w{n}"}, id=f"m{n}", partition=partition)
                for n in (range(300) if partition else range(299, -1, -1))
            ]
        )
    async with b.running(engines=2):
        await b.done()
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(300))
    assert sorted(said(b)) == sorted(f"w{n}" for n in range(300))


async def test_different_messages_with_equal_payload_and_key_are_not_collapsed(bench: MakeBench) -> None:
    b = bench()
    b.send([Sent({"what": "same"}, id=f"m{n}") for n in range(5)] + [Sent({"what": "same"}) for _ in range(3)])
    await b.run_until_done()
    assert await b.effects() == ["same"] * 8
    assert len(b.outputs()) == 8
    assert len({headers["message-id"] for _, _, headers in b.outputs()}) == 8


async def test_random_failures_of_store_and_handler_for_a_hundred_deliveries(bench: MakeBench) -> None:
    b = bench("flaky", batch={"max_messages": 5})
    await b.execute(
        """CREATE FUNCTION stumble() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN IF random() < 0.3 THEN RAISE 'store stumbles' USING ERRCODE = '40001'; END IF; RETURN NULL; END $$""",
        "CREATE TRIGGER stumble AFTER INSERT ON effects FOR EACH STATEMENT EXECUTE FUNCTION stumble()",
    )
    async with b.running():
        for _ in range(5):
            b.send(numbered(20))
            await b.done()
    completed = sorted(
        name.replace("m", "w") for name, row in (await b.inbox()).items() if row["status"] == "completed"
    )
    assert sorted(await b.effects()) == completed
    assert sorted(said(b)) == completed
    assert len(completed) > 15


# --- bad input ---

BAD: dict[str, tuple[Sent, str]] = {
    "not JSON": (Sent(b"hello", id="bad"), "not_json"),
    "empty": (Sent(b"", id="bad"), "not_json"),
    "wrong shape": (Sent([1, 2], id="bad", type="Shaped"), "wrong_shape"),
    "unknown type": (Sent({}, id="bad", type="Nobody"), "unknown_type"),
    "no type": (Sent({}, id="bad", type=None), "unknown_type"),
    "oversized": (Sent(b"x" * 300_000, id="bad"), "oversized"),
    "NUL in id": (Sent({}, id="a\0b"), "bad_id"),
    "long id": (Sent({}, id="x" * 5000), "bad_id"),
    "NUL in type": (Sent({}, id="bad", type="\0"), "unknown_type"),
    "deep nesting": (Sent(b"[" * 50_000 + b"]" * 50_000, id="bad"), "not_json"),
    "huge number": (Sent(b'{"what": 99999999999999999999999999}', id="bad"), "number_out_of_range"),
    "infinite number": (Sent(b'{"what": 1e999}', id="bad"), "not_json"),
    "NUL in text": (Sent({"what": "a\0b"}, id="bad"), "handler_error"),
    "null value where one is needed": (Sent(None, id="bad", type="Shaped"), "null_value"),
}


async def test_every_kind_of_bad_input_ends_as_a_failed_row_and_its_neighbours_are_processed(bench: MakeBench) -> None:
    b = bench({"T": "apply", "Shaped": "shaped"}, message={"max_bytes": 200_000})
    evidence = [("raw", b"\xff\xfe"), ("null", None), *((f"h{n}", b"x") for n in range(100))]
    sent: list[Sent] = []
    for n, (record, _) in enumerate(BAD.values()):
        name = record.id if record.id != "bad" else f"bad{n}"
        bad = Sent(record.value, b"\xff\x00key", record.type, name, list(evidence))
        sent += [Sent({"what": f"before{n}"}, id=f"before{n}"), bad, Sent({"what": f"after{n}"}, id=f"after{n}")]
    b.send(sent)
    await b.run_until_done()
    expected = [what for n in range(len(BAD)) for what in (f"before{n}", f"after{n}")]
    assert await b.effects() == expected
    assert said(b) == expected
    rows = {row["offset"]: row for row in (await b.inbox()).values()}
    for n, (kind, (record, reason)) in enumerate(BAD.items()):
        row = rows[3 * n + 1]
        assert (kind, row["status"], json.loads(row["error"])["reason"]) == (kind, "failed", reason)
        assert row["record_key"] == b"\xff\x00key"
        assert (row["topic"], row["partition"]) == (b.input, 0)
        assert row["payload"] == sent[3 * n + 1].value or json.loads(row["payload"]) == record.value
        assert len(json.loads(row["headers"])) >= 102
    assert handlers.calls["before0"] <= 2


async def test_validator_whose_error_cannot_be_encoded_fails_its_message_and_no_other(
    bench: MakeBench, topics: Topics
) -> None:
    dead = topics("dead")
    b = bench("said", failure={"dead_letter_topic": dead})
    handlers.failing.add("bad")
    b.send([Sent({"what": what}, id=what) for what in ("one", "bad", "two")])
    await b.run_until_done()
    assert await b.effects() == ["one", "two"]
    error = json.loads((await b.inbox())["bad"]["error"])
    assert (error["reason"], error["message"].rpartition(": ")[2]) == ("undecodable", "\\ud83d")
    (letter,) = letters.read(b.bootstrap_servers, dead)
    assert letter.notes["error"] == error["message"]


@pytest.mark.parametrize("odd", [4711, ["no", "state"], chr(0xD83D)], ids=["a number", "a list", "half a pair"])
async def test_handler_whose_error_has_odd_attributes_fails_its_message_and_no_other(
    bench: MakeBench, topics: Topics, odd: Any
) -> None:
    dead = topics("dead")
    b = bench("raise_odd_text", failure={"dead_letter_topic": dead})
    handlers.failing.add("bad")
    handlers.odd = odd
    b.send([Sent({"what": what}, id=what) for what in ("one", "bad", "two")])
    await b.run_until_done()
    assert await b.effects() == ["one", "two"]
    error = json.loads((await b.inbox())["bad"]["error"])
    assert error["exception"] == "OddOfAKind"
    assert "\\ud83d" in error["message"]
    assert [letter.notes["message-id"] for letter in letters.read(b.bootstrap_servers, dead)] == ["bad"]


async def test_missing_id_is_a_failure_under_the_coordinates(bench: MakeBench) -> None:
    b = bench(message={"id": ["header:message-id", "payload:/event_id"]})
    b.send([Sent({"what": "a", "event_id": "e"}), Sent({"what": "b"}), Sent({"what": "c"}, id="m")])
    await b.run_until_done()
    rows = await b.inbox()
    assert {name: row["status"] for name, row in rows.items()} == {
        "e": "completed",
        b.place(1): "failed",
        "m": "completed",
    }
    assert await b.effects() == ["a", "c"]


async def test_null_keys_and_null_values_are_ordinary_input(bench: MakeBench) -> None:
    b = bench("raw")
    b.send([Sent(None, None), Sent(None, b"k"), Sent(b"v", None)])
    await b.run_until_done()
    assert await b.effects() == ["(None, None)", "(b'k', None)", "(None, b'v')"]


# --- failing inside a batch ---


@pytest.mark.parametrize("handler", ["apply", "apply_many", "swallow"])
async def test_failing_messages_are_found_and_everything_else_commits(bench: MakeBench, handler: str) -> None:
    b = bench(handler, batch={"linger_ms": 200})
    bad = {3, 40, 41, 99}
    handlers.failing |= {f"m{n}" for n in bad}
    b.send(numbered(100))
    await b.run_until_done()
    assert await b.effects() == [f"w{n}" for n in range(100) if n not in bad]
    assert {name for name, row in (await b.inbox()).items() if row["status"] == "failed"} == handlers.failing
    if handler != "swallow":
        assert said(b) == await b.effects()


async def test_queued_write_that_fails_is_traced_to_its_message(bench: MakeBench) -> None:
    b = bench("queue", batch={"linger_ms": 200})
    await b.execute("ALTER TABLE effects ADD CHECK (what <> 'w13')")
    b.send(numbered(30))
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(30) if n != 13)
    row = (await b.inbox())["m13"]
    assert row["status"] == "failed"
    assert "SQLSTATE 23514" in json.loads(row["error"])["message"]


async def test_constraint_checked_at_commit_is_traced_to_its_message(bench: MakeBench) -> None:
    b = bench("queue", batch={"linger_ms": 200})
    await b.execute("ALTER TABLE effects ADD UNIQUE (what) DEFERRABLE INITIALLY DEFERRED")
    b.send([*numbered(20), Sent({"what": "w5"}, id="again")])
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(20))
    assert [name for name, row in (await b.inbox()).items() if row["status"] == "failed"] == ["again"]


async def test_rejection_that_has_only_queued_writes_costs_nobody_anything(bench: MakeBench) -> None:
    b = bench({"T": "apply", "R": "queue_and_reject"}, batch={"linger_ms": 200})
    b.send([Sent({"what": f"w{n}"}, id=f"m{n}", type="R" if n % 3 == 0 else "T") for n in range(30)])
    await b.run_until_done()
    assert await b.effects() == [f"w{n}" for n in range(30) if n % 3]
    assert set(handlers.calls.values()) == {1}
    failed = [row for row in (await b.inbox()).values() if row["status"] == "failed"]
    assert {json.loads(row["error"])["reason"] for row in failed} == {"rejected"}
    assert len(failed) == 10


async def test_retry_is_tried_again_after_its_delay_and_order_is_kept(bench: MakeBench) -> None:
    b = bench("later", retry={"attempts": 9})
    handlers.failing.add("m2")
    b.send([Sent({"what": f"w{n}"}, id=f"m{n}") for n in range(5)])
    await b.run_until_done()
    assert said(b) == await b.effects() == [f"w{n}" for n in range(5)]
    assert handlers.calls["m2"] == 3


@pytest.mark.parametrize(
    "command", ["COMMIT", "rollback", " /* x */ END", "-- x\nBEGIN", "SAVEPOINT a", "SELECT 1; COMMIT", "ABORT;"]
)
async def test_handler_cannot_end_the_transaction(bench: MakeBench, command: str) -> None:
    b = bench({"C": "commit", "T": "apply"})
    b.send([Sent({"what": command}, id="c", type="C"), Sent({"what": "fine"}, id="m")])
    await b.run_until_done()
    assert await b.effects() == ["fine"]
    assert {name: row["status"] for name, row in (await b.inbox()).items()} == {"c": "failed", "m": "completed"}


async def test_reads_at_the_same_time_take_turns(bench: MakeBench) -> None:
    b = bench("concurrent_reads")
    b.send([Sent({}, id="m")])
    await b.run_until_done()
    assert await b.effects() == ["[0, 1, 2, 3, 4]"]


async def test_queued_writes_of_one_key_keep_their_order_whatever_their_sql(bench: MakeBench) -> None:
    b = bench("upsert_and_delete", batch={"linger_ms": 200})
    await b.execute("CREATE TABLE latest (key bytea PRIMARY KEY, what text)")
    steps = {b"a": ["1", "delete", "2"], b"b": ["1", "2", "delete"], b"c": ["delete", "1"], b"d": ["1", "delete"]}
    b.send(
        [
            Sent({"what": what}, key, id=f"{key!r}{n}")
            for n in range(3)
            for key, whats in steps.items()
            for what in whats[n : n + 1]
        ]
    )
    await b.run_until_done()
    rows = await b.rows("SELECT key, what FROM latest ORDER BY key")
    assert [(row["key"], row["what"]) for row in rows] == [(b"a", "2"), (b"c", "1")]


# --- outputs ---


async def test_output_carries_identity_and_a_processor_downstream_drops_its_repeat(bench: MakeBench) -> None:
    b = bench()
    trace = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    b.send([Sent({"what": "x"}, b"key", id="m", headers=[("correlation-id", b"root"), ("traceparent", trace)])])
    await b.run_until_done()
    ((key, value, headers),) = b.outputs()
    assert (key, value) == (b"key", {"what": "x"})
    assert headers["causation-id"] == b"m"
    assert headers["correlation-id"] == b"root"
    assert headers["traceparent"] == trace
    assert headers["type"] == b"Applied"
    assert headers["message-id"] == f"{b.key_of('m').hex}-0".encode()


async def test_message_for_a_missing_output_topic_waits_alone_with_its_partition_and_goes_on_when_the_topic_is_there(
    bench: MakeBench, logs: list[Any], topics: Topics
) -> None:
    b = bench({"N": "to_nowhere", "T": "apply"}, partitions=2)
    handlers.nowhere = unique("nowhere")
    before, behind, other = (Sent({"what": what}, id=what, partition=p) for what, p in (("a", 0), ("c", 0), ("d", 1)))
    b.send([before, Sent({"what": "b"}, id="b", type="N", partition=0), behind, other])
    async with b.running():
        await b.done_with(1)
        await b.until(lambda: events(logs, "partition_held"), "partition held")
        await b.until(lambda: b.committed().get(0) == 1, "what comes before it is done")
        assert sorted(await b.effects()) == ["a", "d"]
        held = events(logs, "partition_held")[0]
        assert held["partition"] == f"{b.input}[0]"
        for part in (f"{b.input}:0:1 (b)", "tests.support.handlers:to_nowhere", handlers.nowhere, "create it"):
            assert part in held["reason"]
        assert events(logs, "not_ready")
        topics(handlers.nowhere, exact=True)
        await b.done()
    assert sorted(await b.effects()) == ["a", "b", "c", "d"]
    assert {row["status"] for row in (await b.inbox()).values()} == {"completed"}


async def test_output_topic_that_a_handler_declares_is_looked_for_before_anything_runs(bench: MakeBench) -> None:
    b = bench({"T": {"call": "apply", "outputs": ["no-such-topic"]}})
    b.send([Sent({"what": "fine"}, id="m")])
    with pytest.raises(SetupError, match=r"handlers\.T\.outputs: no-such-topic does not exist; create it"):
        await b.run_until_done()
    assert await b.inbox() == {}


async def test_output_that_is_too_large_fails_its_message_before_anything_is_committed(bench: MakeBench) -> None:
    b = bench({"N": "too_large", "T": "apply"})
    b.send([Sent({"what": "n"}, id="n", type="N"), Sent({"what": "fine"}, id="m")])
    await b.run_until_done()
    assert await b.effects() == ["fine"]
    row = (await b.inbox())["n"]
    assert row["status"] == "failed"
    assert "bytes" in json.loads(row["error"])["message"]


@pytest.mark.parametrize(
    ("handler", "given", "said"),
    [
        ("divide", "output", "NaN or infinity at /number"),
        ("divide", "result", "NaN or infinity at /number"),
        ("divide", "dict", "returned a dict; return an Output, a list of them, or Result(value)"),
        ("divide_many", "column", "NaN or infinity at /number"),
    ],
)
async def test_message_whose_handler_gives_what_cannot_be_sent_fails_and_its_neighbours_do_not(
    bench: MakeBench, handler: str, given: str, said: str
) -> None:
    b = bench(handler)
    handlers.failing.add("m1")
    b.send([Sent({"what": f"w{n}", "as": given}, id=f"m{n}") for n in range(3)])
    await b.run_until_done()
    assert await b.effects() == ["w0", "w2"]
    row = (await b.inbox())["m1"]
    assert (row["status"], row["result"]) == ("failed", None)
    assert said in json.loads(row["error"])["message"]
    assert {value["number"] for _, value, _ in b.outputs()} <= {None}


async def test_batch_handler_must_name_the_cause_of_its_outputs(bench: MakeBench) -> None:
    b = bench("many_without_cause")
    b.send(numbered(2))
    await b.run_until_done()
    assert b.outputs() == []
    for row in (await b.inbox()).values():
        assert row["status"] == "failed"
        assert "cause=message" in json.loads(row["error"])["message"]


# --- identity ---


@pytest.mark.parametrize(
    ("policy", "effects", "statuses"),
    [
        ("fail", ["one", "three"], ["completed", "failed", "completed", "failed"]),
        ("skip", ["one", "three"], ["completed", "completed"]),
        ("process", ["one", "two", "three", "four"], ["completed"] * 4),
    ],
)
async def test_same_id_with_another_payload_is_a_collision_by_policy(
    bench: MakeBench, policy: str, effects: list[str], statuses: list[str]
) -> None:
    b = bench(message={"on_collision": policy})
    b.send([Sent({"what": "one"}, id="m"), Sent({"what": "two"}, id="m")])  # inside one batch
    await b.run_until_done()
    b.send([Sent({"what": "three"}, id="n")])
    await b.run_until_done()
    b.send([Sent({"what": "four"}, id="n")])  # against a row of an earlier one
    await b.run_until_done()
    assert await b.effects() == effects
    assert [row["status"] for row in (await b.inbox()).values()] == statuses


async def payloads(bench: Bench) -> dict[str, tuple[str, str | None]]:
    """What became of messages that are not done, and what is kept of each."""
    return {
        id_: (row["status"], row["payload"] and json.loads(row["payload"])["what"])
        for id_, row in (await bench.inbox()).items()
        if row["status"] != "completed"
    }


async def pending(bench: Bench, id_: str) -> bool:
    return bool(await bench.rows("SELECT FROM inbox WHERE message_id = $1 AND status = 'pending'", id_))


@pytest.mark.parametrize(
    ("policy", "other", "effects"),
    [("fail", ("failed", "two"), ["one"]), ("skip", None, ["one"]), ("process", None, ["two", "one"])],
)
@pytest.mark.parametrize("effect", [False, True], ids=["ordinary", "acts outside"])
async def test_other_payload_under_the_id_of_a_message_in_retry_is_a_collision_by_policy(
    bench: MakeBench, logs: list[Any], effect: bool, policy: str, other: tuple[str, str] | None, effects: list[str]
) -> None:
    b = bench(
        {"T": {"call": "planned", "effect": effect}},
        partitions=2,
        message={"on_collision": policy},
        retry={"attempts": 2},
    )
    handlers.plans["m"] = iter([Retry("not yet", after=3.0)])
    async with b.running():
        b.send([Sent({"what": "one"}, id="m")])
        await b.until(lambda: pending(b, "m"), "the first is in retry")
        (place,) = b.send([Sent({"what": "two"}, id="m", partition=1)])
        await b.done_with(1)
        assert await pending(b, "m"), "the first is in retry still"
        found = await payloads(b)
        await b.done()
    name = f"m~{b.place(place.offset, 1)}"
    assert found == {"m": ("pending", "one")} | ({name: other} if other else {})
    assert await b.effects() == effects
    assert handlers.attempts["m"] == [1, 2], "the other payload counts for nothing"
    assert [event["message_id"] for event in events(logs, "message_collided")] == ["m" if policy == "skip" else name]


@pytest.mark.parametrize(
    ("policy", "other"), [("fail", ("failed", "two")), ("skip", None), ("process", ("parked", "two"))]
)
async def test_other_payload_under_the_id_of_a_parked_message_is_a_collision_by_policy(
    bench: MakeBench, logs: list[Any], policy: str, other: tuple[str, str] | None
) -> None:
    b = bench(message={"on_collision": policy}, failure={"policy": "park-key"})
    handlers.failing.add("head")
    b.send([Sent({"what": "head"}, id="head"), Sent({"what": "one"}, id="m")])
    await b.run_until_done()
    (place,) = b.send([Sent({"what": "two"}, id="m")])
    await b.run_until_done()
    name = f"m~{b.place(place.offset)}"
    waiting = {"head": ("failed", "head"), "m": ("parked", "one")}
    assert await payloads(b) == waiting | ({name: other} if other else {})
    assert await b.effects() == []
    if policy == "fail":
        assert json.loads((await b.inbox())[name]["error"])["reason"] == "collision"
    assert len(events(logs, "message_collided")) == 1


@pytest.mark.parametrize(
    ("policy", "other", "effects"),
    [("fail", ("failed", "two"), []), ("skip", None, []), ("process", None, ["two"])],
)
async def test_other_payload_under_the_id_of_a_failed_message_is_a_collision_by_policy(
    bench: MakeBench, policy: str, other: tuple[str, str] | None, effects: list[str]
) -> None:
    b = bench(message={"on_collision": policy})
    handlers.failing.add("m")
    b.send([Sent({"what": "one"}, id="m")])
    await b.run_until_done()
    handlers.failing.clear()
    (place,) = b.send([Sent({"what": "two"}, id="m")])
    await b.run_until_done()
    assert await payloads(b) == {"m": ("failed", "one")} | ({f"m~{b.place(place.offset)}": other} if other else {})
    assert await b.effects() == effects


async def test_scope_by_type_and_window_tell_equal_ids_apart(bench: MakeBench) -> None:
    b = bench({"T": "apply", "U": "apply"}, message={"scope_by_type": True})
    b.send([Sent({"what": t}, id="same", type=t) for t in "TUTU"])
    await b.run_until_done()
    assert await b.effects() == ["T", "U"]


async def test_type_without_inbox_is_applied_each_time_and_leaves_no_row(bench: MakeBench) -> None:
    b = bench({"T": {"call": "apply", "inbox": False}})
    b.send([Sent({"what": "x"}, id="m"), Sent({"what": "x"}, id="m")])
    await b.run_until_done()
    assert await b.effects() == ["x", "x"]
    ids = [headers["message-id"] for _, _, headers in b.outputs()]
    assert len(ids) == 2
    assert len(set(ids)) == 1
    assert await b.inbox() == {}


# --- stopping ---


async def test_stop_during_a_handler_that_never_ends_rolls_back_and_leaves_nothing_half_done(
    bench: MakeBench,
) -> None:
    b = bench("slow")
    b.send([Sent({"what": "x"}, id="m")])
    with pytest.raises(asyncio.CancelledError):
        await _cancelled_in_the_handler(b)
    assert await b.effects() == []
    assert await b.inbox() == {}
    assert b.committed() in ({}, {0: 0})


async def _cancelled_in_the_handler(bench: Bench) -> None:
    async with bench.running():
        await handlers.gate.wait()
        bench.tasks[0].cancel()


async def test_message_that_fails_and_comes_again_in_the_same_batch_is_tried_again(bench: MakeBench) -> None:
    b = bench("fails_first", batch={"linger_ms": 200})
    b.send([Sent({"what": "x"}, id="m"), Sent({"what": "y"}, id="n"), Sent({"what": "x"}, id="m")])
    await b.run_until_done()
    assert sorted(await b.effects()) == ["x", "y"]
    assert {row["status"] for row in (await b.inbox()).values()} == {"completed"}
    assert handlers.calls["m"] == 2


async def test_failed_collision_is_tried_again_on_its_next_delivery(bench: MakeBench) -> None:
    b = bench(message={"on_collision": "process"})
    b.send([Sent({"what": "one"}, id="m")])
    await b.run_until_done()
    b.send([Sent({"what": "two"}, id="m")])
    handlers.failing.add(f"m~{b.place(b.ends()[0] - 1)}")
    await b.run_until_done()
    assert await b.effects() == ["one"]
    handlers.failing.clear()
    consumer = Consumer({"bootstrap.servers": b.bootstrap_servers, "group.id": b.consumer, "log_level": 0})
    consumer.commit(offsets=[TopicPartition(b.input, 0, 0)], asynchronous=False)
    consumer.close()
    await b.run_until_done()
    assert await b.effects() == ["one", "two"]
