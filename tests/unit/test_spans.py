"""Columns and records tell the same, whichever of them is asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from processor import Database, Message
from processor.handling.registry import Route, _signature, _value_readers
from processor.kafka.assignment import Assignment
from processor.kafka.buffer import RECORD_OVERHEAD, Buffer
from processor.messages import identity
from processor.messages.batch import (
    ColumnSpan,
    Records,
    RowSpan,
    Span,
    assignments_of,
    ends_of,
    messages_of,
    sizes_of,
    stretches_of,
    told,
    usual,
)
from processor.messages.record import Record
from tests.support.assignments import assignment

KEY = identity.inbox_key("c")
COLUMNS = ("ids", "types", "keys", "values", "headers", "offsets", "timestamps", "inbox_keys", "payloads", "checksums")


async def one(message: Message[Any], db: Database) -> None: ...
async def other(message: Message[Any], db: Database) -> None: ...


def route(handler: Any = one) -> Route:
    _, _, annotation = _signature(handler)
    return Route(handler, handler.__name__, *_value_readers(annotation), takes_batch=False, inbox=True)


ONE, OTHER = route(), route(other)


def partition(number: int) -> Assignment:
    return assignment(number)


def span(
    assignment: Assignment, first: int, count: int, of: Route = ONE, sizes: Sequence[int] | None = None
) -> ColumnSpan:
    offsets = list(range(first, first + count))
    ids = [f"m{assignment.partition.number}.{offset}" for offset in offsets]
    return ColumnSpan(
        assignment,
        of,
        ids,
        ["T"] * count,
        [f"k{offset}".encode() for offset in offsets],
        [{"n": offset} for offset in offsets],
        [(("h", str(offset).encode()),) for offset in offsets],
        offsets,
        [None if offset % 2 else 1_700_000_000_000 + offset for offset in offsets],
        list(map(KEY, ids)),
        [b'{"n":%d}' % offset for offset in offsets],
        [offset * 7 for offset in offsets],
        list(sizes) if sizes is not None else [10 + offset for offset in offsets],
    )


def unusual(assignment: Assignment, first: int, count: int, sizes: Sequence[int] | None = None) -> RowSpan:
    return RowSpan(assignment, span(assignment, first, count, sizes=sizes).records())


def facts(record: Record) -> dict[str, Any]:
    """Everything there is to know about it."""
    message = record.message
    return {
        **{name: getattr(message, name) for name in Message.__slots__},
        **{f"record.{name}": getattr(record, name) for name in Record.__slots__ if name != "message"},
    }


def batch(*assignments: Assignment) -> list[Span]:
    """Partitions one after another, the first in two pieces, with a gap in its offsets."""
    first, *others = assignments
    return [span(first, 5, 4), span(first, 20, 3), *(span(a, 100 * n, n) for n, a in enumerate(others, 1))]


Make = Callable[[list[Span]], Sequence[Record]]


def as_told(spans: list[Span]) -> Sequence[Record]:
    records = Records(spans)
    assert list(records)
    assert usual(records) is None
    return records


def as_list(spans: list[Span]) -> Sequence[Record]:
    return list(Records(spans))


def as_columns(spans: list[Span]) -> Sequence[Record]:
    records = Records(spans)
    assert usual(records) is not None
    return records


def as_partly_told(spans: list[Span]) -> Sequence[Record]:
    spans[-1].records()
    records = Records(spans)
    assert usual(records) is None
    return records


KINDS: dict[str, Make] = {"columns": as_columns, "told": as_told, "list": as_list, "partly told": as_partly_told}


# --- who tells what ---


@pytest.mark.parametrize("kind", KINDS)
def test_columns_records_and_lists_tell_the_same(kind: str) -> None:
    a, b, c = partition(0), partition(1), partition(2)
    records = KINDS[kind](batch(a, b, c))
    assert len(records) == 10
    assert ends_of(records) == {a: 23, b: 101, c: 202}
    assert assignments_of(records) == [a, b, c]
    assert sizes_of(records) == {a: 7, b: 1, c: 2}
    assert [(message.partition, message.offset) for message in messages_of(records)] == [
        *((0, offset) for offset in (5, 6, 7, 8, 20, 21, 22)),
        (1, 100),
        (2, 200),
        (2, 201),
    ]
    whose: list[Assignment] = []
    for owner, start, end in stretches_of(records):
        assert start == len(whose)
        whose += [owner] * (end - start)
    assert whose == [a] * 7 + [b] + [c] * 2


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_the_same_however_they_are_asked_for(kind: str) -> None:
    a, b = partition(0), partition(1)
    expected = [facts(record) for record in (*span(a, 5, 4).records(), *span(a, 20, 3).records())]
    expected += [facts(record) for record in span(b, 100, 1).records()]
    records = KINDS[kind](batch(a, b))
    assert [facts(record) for record in records] == expected
    assert [facts(records[index]) for index in range(len(records))] == expected
    assert [facts(record) for record in records[2:6]] == expected[2:6]
    assert facts(records[-1]) == expected[-1]


def test_nothing_tells_nothing() -> None:
    nothing: list[Sequence[Record]] = [Records([]), [], ()]
    for records in nothing:
        assert usual(records) is None
        assert list(told(records)) == []
        assert (ends_of(records), sizes_of(records)) == ({}, {})
        assert (assignments_of(records), stretches_of(records), messages_of(records)) == ([], [], [])
        assert not records


def test_columns_of_several_spans_are_one_after_another() -> None:
    a, b = partition(0), partition(1)
    spans = batch(a, b)
    bulk = usual(Records(spans))
    assert bulk is not None
    assert len(bulk) == 8
    assert bulk.route is ONE
    for name in (*COLUMNS, "sizes"):
        assert bulk.column(name) == [value for span in spans for value in getattr(span, name)]
    alone = usual(Records(spans[:1]))
    assert alone is not None
    assert alone.column("ids") == ["m0.5", "m0.6", "m0.7", "m0.8"]


# --- what is usual ---


def test_nothing_is_to_tell_of_usual_records_until_one_is_made() -> None:
    records = Records(batch(partition(0), partition(1)))
    assert usual(records) is not None
    assert told(records) == ()
    assert len(messages_of(records)) == len(records)
    assert usual(records) is not None, "messages alone tell nothing new"
    assert records[0].failure is None
    assert usual(records) is None
    assert told(records) is records


def test_one_span_that_has_been_told_makes_the_batch_unusual() -> None:
    spans = batch(partition(0), partition(1))
    spans[1].records()
    assert usual(Records(spans)) is None
    assert usual(Records(spans[:1])) is not None


def test_handlers_that_differ_make_the_batch_unusual() -> None:
    a = partition(0)
    mixed = Records([span(a, 0, 2), span(a, 2, 2, OTHER)])
    assert usual(mixed) is None
    assert [record.route for record in mixed] == [ONE, ONE, OTHER, OTHER]
    assert ends_of(mixed) == {a: 4}
    assert usual(Records([span(a, 2, 2, OTHER)])) is not None


def test_unusual_records_and_plain_lists_are_never_usual() -> None:
    a = partition(0)
    assert usual(Records([unusual(a, 0, 2)])) is None
    assert usual(Records([span(a, 0, 2), unusual(a, 2, 2)])) is None
    records = span(a, 0, 2).records()
    assert usual(records) is None
    assert told(records) is records


# --- what is made is made once ---


def test_messages_are_those_of_the_records_whichever_are_made_first() -> None:
    for first in ("messages", "records"):
        records = Records(batch(partition(0), partition(1)))
        messages = messages_of(records) if first == "messages" else []
        made = list(records)
        messages = messages or messages_of(records)
        assert all(record.message is message for record, message in zip(made, messages, strict=True))
        assert all(again is record for again, record in zip(records, made, strict=True))
        assert all(again is message for again, message in zip(messages_of(records), messages, strict=True))


def test_what_is_said_of_a_record_stays_said() -> None:
    spans = batch(partition(0))
    records = Records(spans)
    records[1].parked = True
    records[1].message.id = "another"
    assert [record.parked for record in Records(spans)] == [False, True, *[False] * 5]
    assert messages_of(Records(spans))[1].id == "another"


# --- parts ---


@pytest.mark.parametrize("size", range(6))
def test_parts_lose_nothing_and_keep_the_order(size: int) -> None:
    a = partition(0)
    whole = span(a, 7, 5)
    first, rest = whole.part(0, size), whole.part(size, 5)
    assert (len(first), len(rest)) == (size, 5 - size)
    assert first.size + rest.size == whole.size == sum(whole.sizes)
    for name in (*COLUMNS, "sizes"):
        assert getattr(first, name) + getattr(rest, name) == getattr(whole, name)
    for part in (first, rest):
        assert (part.assignment, part.route, part.told) == (a, ONE, False)
    expected = [facts(record) for record in whole.records()]
    assert [facts(record) for record in (*first.records(), *rest.records())] == expected


@pytest.mark.parametrize("size", range(6))
def test_parts_of_unusual_records_keep_the_very_records(size: int) -> None:
    a = partition(0)
    whole = unusual(a, 7, 5)
    whole.records()[2].parked = True
    first, rest = whole.part(0, size), whole.part(size, 5)
    assert (len(first), len(rest)) == (size, 5 - size)
    assert first.sizes + rest.sizes == whole.sizes
    assert first.size + rest.size == whole.size == sum(whole.sizes)
    parts = [*first.records(), *rest.records()]
    assert all(part is record for part, record in zip(parts, whole.records(), strict=True))
    assert [*first.messages(), *rest.messages()] == whole.messages()


# --- what a batch takes from a buffer ---


def offsets(spans: Sequence[Span]) -> list[int]:
    return [message.offset for span in spans for message in span.messages()]


Spans = Callable[[Assignment, int, int, Sequence[int]], Span]


def usual_span(assignment: Assignment, first: int, count: int, sizes: Sequence[int]) -> Span:
    return span(assignment, first, count, sizes=sizes)


def unusual_span(assignment: Assignment, first: int, count: int, sizes: Sequence[int]) -> Span:
    return unusual(assignment, first, count, sizes)


@pytest.mark.parametrize("make", [usual_span, unusual_span])
@pytest.mark.parametrize(
    ("most", "max_bytes", "expected"),
    [
        (100, 10_000, 10),  # all of them
        (4, 10_000, 4),  # the first span, whole
        (3, 10_000, 3),
        (5, 10_000, 5),
        (0, 10_000, 0),
        (100, 0, 0),
        (100, 1, 1),  # the first one always goes, however large
        (100, 99, 1),
        (100, 100, 1),
        (100, 101, 2),
        (100, 400, 4),
        (100, 401, 5),
        (100, 999, 10),
        (3, 250, 3),  # whichever is over first
        (2, 250, 2),
        (5, 250, 3),
    ],
)
def test_batch_takes_no_more_than_its_counts_and_bytes(make: Spans, most: int, max_bytes: int, expected: int) -> None:
    """Ten records of 100 bytes each in three spans; those go that begin within the limit."""
    a = partition(0)
    buffer = filled(make(a, 0, 4, [100] * 4), make(a, 4, 1, [100]), make(a, 5, 5, [100] * 5))
    taken = buffer.take(most, max_bytes)
    assert offsets(taken) == list(range(expected))
    assert (buffer.records, buffer.bytes) == (10 - expected, (10 - expected) * (100 + RECORD_OVERHEAD))
    rest = buffer.take(100, 100_000)
    assert offsets([*taken, *rest]) == list(range(10))
    assert all(map(len, [*taken, *rest])), "an empty span is nobody's"
    assert (buffer.records, buffer.bytes) == (0, 0)


@pytest.mark.parametrize("make", [usual_span, unusual_span])
def test_batches_one_after_another_take_everything_in_order(make: Spans) -> None:
    a = partition(0)
    sizes = [1, 900, 1, 1, 250, 3000, 1, 1, 1, 5, 300, 300]
    buffer = filled(make(a, 0, 5, sizes[:5]), make(a, 5, 1, sizes[5:6]), make(a, 6, 6, sizes[6:]))
    found: list[int] = []
    while buffer.records:
        taken = buffer.take(4, 300)
        assert 1 <= sum(map(len, taken)) <= 4
        assert sum(size for span in taken for size in span.sizes) - taken[-1].sizes[-1] < 300
        found += offsets(taken)
    assert found == list(range(len(sizes)))


def test_what_stays_in_the_buffer_is_usual_still() -> None:
    buffer = filled(span(partition(0), 0, 10))
    taken = Records(buffer.take(3, 10_000))
    assert [record.message.offset for record in taken] == [0, 1, 2]
    assert usual(Records(buffer.take(10, 10_000))) is not None, "only those that were taken are told"


def test_emptied_buffer_begins_anew() -> None:
    a = partition(0)
    buffer = filled(span(a, 0, 10))
    buffer.take(3, 10_000)
    buffer.clear()
    assert (buffer.records, buffer.bytes, buffer.take(1, 1)) == (0, 0, [])
    buffer.extend([span(a, 20, 4)])
    assert offsets(buffer.take(100, 10_000)) == [20, 21, 22, 23]


def filled(*spans: Span) -> Buffer:
    buffer = Buffer()
    buffer.extend(spans)
    return buffer
