"""What a batch takes from the records that were read ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from processor.kafka.buffer import RECORD_OVERHEAD, Buffer
from processor.messages.batch import Batch, Span
from processor.messages.record import Reading
from tests.support.readings import reading
from tests.support.spans import row_span, span


def offsets(spans: Sequence[Span]) -> list[int]:
    return [record.message.offset for span in spans for record in span.rows()]


Spans = Callable[[Reading, int, int, Sequence[int]], Span]


def column_span(reading: Reading, first: int, count: int, sizes: Sequence[int]) -> Span:
    return span(reading, first, count, sizes=sizes)


def row_span_of(reading: Reading, first: int, count: int, sizes: Sequence[int]) -> Span:
    return row_span(reading, first, count, sizes)


@pytest.mark.parametrize("make", [column_span, row_span_of])
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
    a = reading(0)
    buffer = filled(make(a, 0, 4, [100] * 4), make(a, 4, 1, [100]), make(a, 5, 5, [100] * 5))
    taken = buffer.take(most, max_bytes)
    assert offsets(taken) == list(range(expected))
    assert (buffer.records, buffer.bytes) == (10 - expected, (10 - expected) * (100 + RECORD_OVERHEAD))
    rest = buffer.take(100, 100_000)
    assert offsets([*taken, *rest]) == list(range(10))
    assert all(map(len, [*taken, *rest])), "an empty span is nobody's"
    assert (buffer.records, buffer.bytes) == (0, 0)


@pytest.mark.parametrize("make", [column_span, row_span_of])
def test_batches_one_after_another_take_everything_in_order(make: Spans) -> None:
    a = reading(0)
    sizes = [1, 900, 1, 1, 250, 3000, 1, 1, 1, 5, 300, 300]
    buffer = filled(make(a, 0, 5, sizes[:5]), make(a, 5, 1, sizes[5:6]), make(a, 6, 6, sizes[6:]))
    found: list[int] = []
    while buffer.records:
        taken = buffer.take(4, 300)
        assert 1 <= sum(map(len, taken)) <= 4
        assert sum(size for span in taken for size in span.sizes) - taken[-1].sizes[-1] < 300
        found += offsets(taken)
    assert found == list(range(len(sizes)))


def test_what_stays_in_the_buffer_stays_in_columns() -> None:
    buffer = filled(span(reading(0), 0, 10))
    taken = Batch(buffer.take(3, 10_000))
    assert [record.message.offset for record in taken.as_rows()] == [0, 1, 2]
    assert Batch(buffer.take(10, 10_000)).columns is not None, "only those that were taken are in rows"


def test_emptied_buffer_begins_anew() -> None:
    a = reading(0)
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
