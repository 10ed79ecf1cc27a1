"""Batches by the column: the same guarantees, whether anything is special about a record in the batch or not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from processor import Database, Messages
from processor.messages.batch import Columns
from processor.messages.outputs import message_id
from processor.postgres.claims import COPY_FROM
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent

COUNT = 250  # more than a piece that is decoded together, and enough for COPY


class Seen:
    """The batches that a handler was given: by their ids, and whether they were columns all the way."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], bool]] = []

    async def meet(self, messages: Messages[Any], db: Database) -> None:
        assert isinstance(messages, Messages)
        columns = isinstance(getattr(messages._make, "__self__", None), Columns)
        self.batches.append((list(messages.ids), columns))

    @property
    def columns(self) -> set[bool]:
        return {columns for _, columns in self.batches}


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()
    monkeypatch.setattr(handlers, "meet", seen.meet)
    return seen


def numbered(count: int, **fields: Any) -> list[Sent]:
    return [Sent({"what": f"w{n}"}, f"k{n % 7}".encode(), id=f"m{n}", **fields) for n in range(count)]


def said(bench: Bench) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs()]


async def in_one_batch(bench: Bench, records: Sequence[Sent]) -> None:
    """Send these so that they are processed together: they come in while the engine is busy with one before them."""
    bench.send([Sent({"what": "gate"}, b"gate", "G", "gate")])
    await bench.until(lambda: handlers.calls["gate"], "busy")
    bench.send(records)
    source = bench.engines[0].reader
    await bench.until(lambda: source.buffered == len(records), "all of them read")
    handlers.gate.set()


async def not_completed(bench: Bench) -> dict[str, str]:
    """Why, by message id."""
    return {
        id_: json.loads(row["error"])["reason"]
        for id_, row in (await bench.inbox()).items()
        if row["status"] != "completed"
    }


BOTH = {"T": "by_column", "G": "hold_up"}


async def test_columns_in_and_out_give_every_message_its_row_and_its_output(bench: MakeBench, seen: Seen) -> None:
    b = bench(BOTH)
    async with b.running():
        await in_one_batch(b, numbered(COUNT))
        await b.done()
    assert await b.effects() == [f"w{n}" for n in range(COUNT)]
    found = b.outputs()
    assert [(key, value["what"]) for key, value, _ in found] == [(f"k{n % 7}".encode(), f"w{n}") for n in range(COUNT)]
    assert [headers for _, _, headers in found] == [
        {
            "message-id": message_id(b.key_of(f"m{n}").bytes, 0).encode(),
            "causation-id": f"m{n}".encode(),
            "correlation-id": f"m{n}".encode(),
            "type": b"Applied",
        }
        for n in range(COUNT)
    ]
    rows = await b.inbox()
    assert {row["status"] for row in rows.values()} == {"completed"}
    assert {id_: row["offset"] for id_, row in rows.items()} == {
        "gate": 0,
        **{f"m{n}": n + 1 for n in range(COUNT)},
    }
    assert seen.batches == [([f"m{n}" for n in range(COUNT)], True)]


async def test_columns_of_several_partitions_go_to_their_own(bench: MakeBench, seen: Seen) -> None:
    b = bench("by_column", partitions=3, batch={"max_messages": 100})
    for partition in range(3):
        b.send(
            [
                Sent({"what": f"{partition}.{n}"}, None, id=f"m{partition}.{n}", partition=partition)
                for n in range(COUNT)
            ]
        )
    await b.run_until_done()
    expected = sorted(f"{partition}.{n}" for partition in range(3) for n in range(COUNT))
    assert sorted(await b.effects()) == sorted(said(b)) == expected
    for partition in range(3):
        own = [what for what in await b.effects() if what.startswith(f"{partition}.")]
        assert own == [f"{partition}.{n}" for n in range(COUNT)]
    assert {(headers["causation-id"].decode(), value["what"]) for _, value, headers in b.outputs()} == {
        (f"m{what}", what) for what in expected
    }
    assert True in seen.columns  # but for batches that were too small for COPY
    rows = await b.inbox()
    assert {(row["partition"], row["offset"]) for row in rows.values()} == {
        (partition, n) for partition in range(3) for n in range(COUNT)
    }


async def test_correlation_and_trace_of_a_message_are_passed_on_by_the_column(bench: MakeBench, seen: Seen) -> None:
    b = bench(BOTH)
    sent = numbered(COUNT)
    sent[1].headers += [("correlation-id", b"root"), ("traceparent", b"t-1")]
    async with b.running():
        await in_one_batch(b, sent)
        await b.done()
    found = [headers for _, _, headers in b.outputs()]
    ids = [f"m{n}".encode() for n in range(COUNT)]
    assert [headers["causation-id"] for headers in found] == ids
    assert [headers["correlation-id"] for headers in found] == [b"m0", b"root", *ids[2:]]
    assert [headers.get("traceparent") for headers in found] == [None, b"t-1", *[None] * (COUNT - 2)]
    assert {headers["type"] for headers in found} == {b"Applied"}
    assert seen.columns == {True}


async def test_duplicates_bad_and_failing_records_in_a_batch_of_columns(bench: MakeBench, seen: Seen) -> None:
    b = bench(BOTH)
    handlers.failing.add("m150")
    sent = numbered(COUNT)
    sent[20] = Sent(b"{no JSON", b"k", id="m20")
    sent[120] = Sent({"what": "w3"}, b"k3", id="m3")
    sent[240] = Sent({"what": "w220"}, b"k3", id="m220")
    async with b.running():
        await in_one_batch(b, sent)
        await b.done()
    good = [f"w{n}" for n in range(COUNT) if n not in (20, 120, 150, 240)]
    assert await b.effects() == good
    assert said(b) == good
    assert await not_completed(b) == {"m20": "not_json", "m150": "handler_error"}
    rows = await b.inbox()
    assert len(rows) == 1 + COUNT - 2
    assert "told to fail on ['m150']" in json.loads(rows["m150"]["error"])["message"]
    assert rows["m20"]["payload"] == b"{no JSON"
    assert (rows["m3"]["offset"], rows["m220"]["offset"]) == (4, 221)
    assert [headers["message-id"] for _, _, headers in b.outputs()] == [
        message_id(b.key_of(what.replace("w", "m")).bytes, 0).encode() for what in good
    ]
    first, columns = seen.batches[0]
    assert len(first) == COUNT - 3, "all but the repeated and the bad one, at first together"
    assert not columns


@pytest.mark.parametrize("odd", ["repeated", "bad", "failing", "known", "none"])
async def test_one_special_record_costs_the_others_nothing(bench: MakeBench, seen: Seen, odd: str) -> None:
    b = bench(BOTH)
    sent = numbered(COUNT)
    if odd == "repeated":
        sent.append(Sent({"what": "w5"}, b"k5", id="m5"))
    elif odd == "bad":
        sent.append(Sent(b"no JSON", b"k", id="bad"))
    elif odd == "failing":
        handlers.failing.add("bad")
        sent.append(Sent({"what": "bad"}, b"k", id="bad"))
    async with b.running():
        if odd == "known":
            b.send([sent[7]])
            await b.done()
        await in_one_batch(b, sent)
        await b.done()
    assert sorted(await b.effects()) == sorted(said(b)) == sorted(f"w{n}" for n in range(COUNT))
    assert list(await not_completed(b)) == (["bad"] if odd in ("bad", "failing") else [])
    if odd == "none":
        assert seen.columns == {True}
    else:
        assert False in seen.columns


async def test_columns_in_and_outputs_with_a_cause_out(bench: MakeBench, seen: Seen) -> None:
    b = bench({"T": "by_column_with_cause", "G": "hold_up"})
    async with b.running():
        await in_one_batch(b, numbered(COUNT))
        await b.done()
    assert await b.effects() == [f"w{n}" for n in range(COUNT)]
    answered = [n for n in range(COUNT) if (n + 1) % 2 == 0]  # the gate has offset 0
    found = b.outputs()
    assert [value["what"] for _, value, _ in found] == [f"w{n}.{place}" for n in answered for place in range(2)]
    assert [headers for _, _, headers in found] == [
        {
            "message-id": message_id(b.key_of(f"m{n}").bytes, place).encode(),
            "causation-id": f"m{n}".encode(),
            "correlation-id": f"m{n}".encode(),
            "n": str(place).encode(),
        }
        for n in answered
        for place in range(2)
    ]
    assert [key for key, _, _ in found] == [f"k{n % 7}".encode() for n in answered for _ in range(2)]
    assert seen.columns == {True}


async def test_columns_in_and_outputs_with_a_cause_out_where_records_were_made(bench: MakeBench, seen: Seen) -> None:
    b = bench({"T": "by_column_with_cause", "G": "hold_up"})
    sent = numbered(COUNT)
    sent[101] = Sent(b"no JSON", b"k", id="m101")
    sent[102] = Sent({"what": "w1"}, b"k1", id="m1")
    async with b.running():
        await in_one_batch(b, sent)
        await b.done()
    good = [n for n in range(COUNT) if n not in (101, 102)]
    assert await b.effects() == [f"w{n}" for n in good]
    assert said(b) == [f"w{n}.{place}" for n in good if (n + 1) % 2 == 0 for place in range(2)]
    assert await not_completed(b) == {"m101": "not_json"}
    assert seen.columns == {False}


async def test_outputs_of_a_wrong_length_fail_their_messages_and_leave_nothing(bench: MakeBench, seen: Seen) -> None:
    b = bench({"T": "uneven_outputs", "G": "hold_up"})
    async with b.running():
        await in_one_batch(b, numbered(COPY_FROM))
        await b.done()
    rows = await b.inbox()
    assert {id_ for id_, row in rows.items() if row["status"] == "failed"} == {f"m{n}" for n in range(COPY_FROM)}
    for n in range(COPY_FROM):
        error = json.loads(rows[f"m{n}"]["error"])
        assert error["reason"] == "handler_error"
        assert "Outputs are one for each message" in error["message"]
        assert "there are 1 messages, 2 values" in error["message"]
        assert "return a list of Output for anything else" in error["message"]
        assert json.loads(rows[f"m{n}"]["payload"]) == {"what": f"w{n}"}
    assert (await b.effects(), b.outputs()) == ([], [])
    assert seen.batches[0] == ([f"m{n}" for n in range(COPY_FROM)], True)


async def test_handler_that_answers_too_often_for_some_fails_only_those(bench: MakeBench, seen: Seen) -> None:
    """Each batch handler is one transaction: the good neighbours of a wrong answer are done without it."""
    b = bench({"T": "by_column", "U": "uneven_outputs", "G": "hold_up"})
    sent = numbered(30)
    for n in (4, 5, 17):
        sent[n].type = "U"
    async with b.running():
        await in_one_batch(b, sent)
        await b.done()
    good = [f"w{n}" for n in range(30) if n not in (4, 5, 17)]
    assert await b.effects() == said(b) == good
    assert await not_completed(b) == {f"m{n}": "handler_error" for n in (4, 5, 17)}


LONG = [f"{7**37 + n:032d}" for n in range(COUNT)]


async def test_ids_of_many_digits_are_usual(bench: MakeBench, seen: Seen) -> None:
    b = bench(BOTH, message={"id": ["payload:/event_id", "header:message-id"]})
    async with b.running():
        await in_one_batch(b, [Sent({"event_id": id_, "what": id_}) for id_ in LONG])
        await b.done()
    assert await b.effects() == said(b) == LONG
    assert set(await b.inbox()) == {"gate", *LONG}
    assert [headers["causation-id"].decode() for _, _, headers in b.outputs()] == LONG
    assert seen.batches == [(LONG, True)]


async def test_integer_beyond_64_bits_among_ids_of_many_digits_fails_only_its_own_record(
    bench: MakeBench, seen: Seen
) -> None:
    b = bench(BOTH, message={"id": ["payload:/event_id", "header:message-id"]})
    sent = [Sent({"event_id": id_, "what": id_}) for id_ in LONG]
    sent[130] = Sent({"event_id": LONG[130], "what": "huge", "n": 2**64})
    sent[131] = Sent({"event_id": LONG[131], "what": LONG[131], "n": 2**64 - 1, "m": -(2**63)})
    async with b.running():
        await in_one_batch(b, sent)
        await b.done()
    good = [id_ for n, id_ in enumerate(LONG) if n != 130]
    assert await b.effects() == said(b) == good
    # In a value that cannot be read there is no id either.
    assert await not_completed(b) == {b.place(131): "number_out_of_range"}
    assert sorted(handlers.calls) == sorted(["gate", *good])
