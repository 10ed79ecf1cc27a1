"""Columns and rows have the same facts, whichever of them is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from processor import Message
from processor.messages.batch import Batch, RowSpan, Span
from processor.messages.message import Partition
from processor.messages.record import Reading, Record
from tests.support.readings import reading
from tests.support.spans import ONE, OTHER, row_span, span

COLUMNS = ("ids", "types", "keys", "values", "headers", "offsets", "timestamps", "inbox_keys", "payloads", "checksums")


def facts(record: Record) -> dict[str, Any]:
    """Everything there is to know about it."""
    message = record.message
    return {
        **{name: getattr(message, name) for name in Message.__slots__},
        **{f"record.{name}": getattr(record, name) for name in Record.__slots__ if name != "message"},
    }


def spans_of(*readings: Reading) -> list[Span]:
    """Partitions one after another, the first in two pieces, with a gap in its offsets."""
    first, *others = readings
    return [span(first, 5, 4), span(first, 20, 3), *(span(a, 100 * n, n) for n, a in enumerate(others, 1))]


Make = Callable[[list[Span]], Batch]


def in_columns(spans: list[Span]) -> Batch:
    batch = Batch(spans)
    assert batch.columns is not None
    return batch


def in_rows(spans: list[Span]) -> Batch:
    batch = Batch(spans)
    assert batch.as_rows()
    assert batch.columns is None
    return batch


def of_rows(spans: list[Span]) -> Batch:
    return Batch.of_rows(Batch(spans).as_rows())


def in_rows_in_part(spans: list[Span]) -> Batch:
    *others, last = spans
    batch = Batch([*others, RowSpan(last.reading, last.rows())])
    assert batch.columns is None
    return batch


KINDS: dict[str, Make] = {"columns": in_columns, "rows": in_rows, "of rows": of_rows, "mixed": in_rows_in_part}


# --- what a batch knows ---


@pytest.mark.parametrize("kind", KINDS)
def test_batch_knows_the_same_in_columns_and_in_rows(kind: str) -> None:
    a, b, c = reading(0), reading(1), reading(2)
    batch = KINDS[kind](spans_of(a, b, c))
    assert len(batch) == 10
    assert batch.ends() == {a.partition: 23, b.partition: 101, c.partition: 202}
    assert batch.readings() == {a.partition: a, b.partition: b, c.partition: c}
    assert batch.sizes() == {a.partition: 7, b.partition: 1, c.partition: 2}
    assert [(message.partition, message.offset) for message in batch.messages()] == [
        *((0, offset) for offset in (5, 6, 7, 8, 20, 21, 22)),
        (1, 100),
        (2, 200),
        (2, 201),
    ]
    whose: list[Partition] = []
    for owner, start, end in batch.stretches():
        assert start == len(whose)
        whose += [owner] * (end - start)
    assert whose == [a.partition] * 7 + [b.partition] + [c.partition] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_same_however_the_batch_was_made(kind: str) -> None:
    a, b = reading(0), reading(1)
    expected = [facts(record) for record in (*span(a, 5, 4).rows(), *span(a, 20, 3).rows())]
    expected += [facts(record) for record in span(b, 100, 1).rows()]
    batch = KINDS[kind](spans_of(a, b))
    assert [facts(record) for record in batch.as_rows()] == expected


def test_empty_batch_knows_nothing() -> None:
    for batch in (Batch([]), Batch(()), Batch.of_rows([])):
        assert batch.columns is None
        assert (list(batch.rows), batch.as_rows(), batch.messages()) == ([], [], [])
        assert (batch.ends(), batch.sizes(), batch.readings(), batch.stretches()) == ({}, {}, {}, [])
        assert not batch


def test_columns_of_several_spans_are_one_after_another() -> None:
    spans = spans_of(reading(0), reading(1))
    columns = Batch(spans).columns
    assert columns is not None
    assert len(columns) == 8
    assert columns.message_type is ONE
    for name in (*COLUMNS, "sizes"):
        assert columns.column(name) == [value for span in spans for value in getattr(span, name)]
    alone = Batch(spans[:1]).columns
    assert alone is not None
    assert alone.column("ids") == ["m0.5", "m0.6", "m0.7", "m0.8"]


# --- columns or rows ---


def test_batch_stays_in_columns_until_it_is_turned_into_rows() -> None:
    batch = in_columns(spans_of(reading(0), reading(1)))
    assert not batch.rows
    assert len(batch.messages()) == len(batch)
    assert not batch.rows, "messages alone decide nothing"
    rows = batch.as_rows()
    assert rows[0].failure is None
    assert batch.columns is None
    assert batch.rows is rows


def test_one_span_in_rows_puts_the_batch_in_rows() -> None:
    a, b = reading(0), reading(1)
    assert Batch([span(a, 0, 2), row_span(b, 0, 2)]).columns is None
    assert Batch([row_span(a, 0, 2)]).columns is None
    assert Batch([span(a, 0, 2)]).columns is not None


def test_types_that_differ_put_the_batch_in_rows() -> None:
    a = reading(0)
    mixed = Batch([span(a, 0, 2), span(a, 2, 2, OTHER)])
    assert mixed.columns is None
    assert [record.message_type for record in mixed.rows] == [ONE, ONE, OTHER, OTHER]
    assert mixed.ends() == {a.partition: 4}
    assert Batch([span(a, 2, 2, OTHER)]).columns is not None


# --- what is made is made once ---


def test_messages_are_those_of_the_rows_whichever_are_made_first() -> None:
    for first in ("messages", "rows"):
        batch = Batch(spans_of(reading(0), reading(1)))
        messages = batch.messages() if first == "messages" else []
        made = batch.as_rows()
        messages = messages or batch.messages()
        assert all(record.message is message for record, message in zip(made, messages, strict=True))
        assert batch.as_rows() is made
        assert all(again is message for again, message in zip(batch.messages(), messages, strict=True))


def test_what_is_decided_about_a_record_stays_decided() -> None:
    batch = Batch(spans_of(reading(0)))
    batch.as_rows()[1].parked = True
    batch.as_rows()[1].message.id = "another"
    assert [record.parked for record in batch.rows] == [False, True, *[False] * 5]
    assert batch.messages()[1].id == "another"
    assert [record.parked for record in batch.part(1, 3).rows] == [True, False]


# --- parts ---


@pytest.mark.parametrize("size", range(6))
def test_parts_lose_nothing_and_keep_the_order(size: int) -> None:
    a = reading(0)
    whole = span(a, 7, 5)
    first, rest = whole.part(0, size), whole.part(size, 5)
    assert (len(first), len(rest)) == (size, 5 - size)
    assert first.size + rest.size == whole.size == sum(whole.sizes)
    for name in (*COLUMNS, "sizes"):
        assert getattr(first, name) + getattr(rest, name) == getattr(whole, name)
    for part in (first, rest):
        assert (part.reading, part.message_type) == (a, ONE)
    expected = [facts(record) for record in whole.rows()]
    assert [facts(record) for record in (*first.rows(), *rest.rows())] == expected


@pytest.mark.parametrize("size", range(6))
def test_parts_of_rows_keep_the_very_records(size: int) -> None:
    whole = row_span(reading(0), 7, 5)
    whole.rows()[2].parked = True
    first, rest = whole.part(0, size), whole.part(size, 5)
    assert (len(first), len(rest)) == (size, 5 - size)
    assert first.sizes + rest.sizes == whole.sizes
    assert first.size + rest.size == whole.size == sum(whole.sizes)
    parts = [*first.rows(), *rest.rows()]
    assert all(part is record for part, record in zip(parts, whole.rows(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_part_of_a_batch_is_in_rows_unless_it_is_all_of_it(kind: str) -> None:
    batch = KINDS[kind](spans_of(reading(0), reading(1)))
    assert batch.part(0, 8) is batch
    part = batch.part(2, 8)
    assert part.columns is None
    assert [record.message.offset for record in part.rows] == [7, 8, 20, 21, 22, 100]
    assert all(one is other for one, other in zip(part.rows, batch.rows[2:8], strict=True))
