"""Which message killed the processes before us: what is marked, who is suspected, and when it is quarantined."""

from __future__ import annotations

import pytest

from processor.engine.crashes import PIECE, CrashTracker, Marker
from processor.engine.partitions import OwnedPartition, Partitions
from processor.messages.batch import Batch
from processor.messages.record import Reading
from processor.postgres.ledger import LedgerRow
from tests.support.readings import reading
from tests.unit.engine.conftest import TakeOver
from tests.unit.engine.given import UNUSED, batch_of, current_reading, offsets, owned_partition, records_of, settings

BATCH = 500


def tracker(quarantine_after: int = 3, partitions: Partitions = UNUSED) -> CrashTracker:
    changed = settings(failure={"quarantine_after": quarantine_after}, batch={"max_messages": BATCH})
    return CrashTracker(changed, partitions, UNUSED, UNUSED)


def suspected(suspects: range | None, deaths: int = 0, number: int = 0) -> OwnedPartition:
    owned = owned_partition(number)
    owned.crashes.suspects, owned.crashes.deaths, owned.crashes.records_to_mark = suspects, deaths, BATCH
    return owned


# --- who is quarantined ---


@pytest.mark.parametrize(
    ("quarantine_after", "deaths", "quarantined"),
    [
        (2, 0, False),
        (2, 1, False),  # it may be a coincidence
        (2, 2, True),
        (3, 1, False),
        (3, 2, True),
        (4, 2, True),  # with the one that left no mark, and the one whose mark was that of a piece
        (5, 2, False),
        (5, 3, True),
        (10, 7, False),
        (10, 8, True),
        (100, 97, False),
        (100, 98, True),
    ],
)
def test_record_that_was_alone_at_enough_deaths_is_failed_without_being_tried(
    quarantine_after: int, deaths: int, quarantined: bool
) -> None:
    owned = suspected(range(5, 6), deaths)
    batch = batch_of(reading(), 10)
    tracker(quarantine_after).prepare(batch, [owned])
    failed = [record for record in batch.rows if record.failure is not None]
    assert offsets(failed) == ([5] if quarantined else [])
    assert owned.crashes.records_to_mark == (0 if quarantined else BATCH), "no search once it is found"
    for record in failed:
        assert record.failure is not None
        assert record.failure.reason == "quarantined"
        assert record.failure.detail.startswith(f"{deaths} processes"), "those that are known to have died of it"


@pytest.mark.parametrize("suspects", [range(5, 7), range(4, 6), range(10)])
def test_record_is_not_quarantined_while_another_may_have_done_it(suspects: range) -> None:
    owned = suspected(suspects, deaths=99)
    batch = batch_of(reading(), 10)
    tracker().prepare(batch, [owned])
    assert [record.failure for record in batch.as_rows()] == [None] * 10
    assert owned.crashes.records_to_mark == BATCH


def test_record_at_the_same_offset_of_another_partition_is_not_suspected() -> None:
    owned, other = suspected(range(5, 6), deaths=9, number=0), suspected(None, number=1)
    batch = Batch.of_rows([*records_of(reading(0), 4, 6), *records_of(reading(1), 5)])
    tracker().prepare(batch, [owned, other])
    assert [record.failure for record in batch.rows] == [None] * 3


@pytest.mark.parametrize(
    ("quarantine_after", "killed", "quarantined"), [(2, 1, False), (2, 2, True), (3, 2, False), (3, 3, True)]
)
def test_record_whose_own_row_counts_enough_attempts_without_an_end_is_failed(
    quarantine_after: int, killed: int, quarantined: bool
) -> None:
    (record,) = records_of(reading(), 5)
    tracker(quarantine_after).quarantine_if_deadly(record, killed)
    assert (record.failure is not None) is quarantined
    if record.failure is not None:
        assert record.failure.detail.startswith(f"{killed} processes")


# --- records with a history ---


def test_batch_of_partitions_without_a_history_stays_in_columns() -> None:
    batch = batch_of(reading(), 10)
    tracker().prepare(batch, [suspected(None)])
    assert batch.columns is not None


def test_record_that_failed_before_remembers_its_attempts_and_is_tried_alone() -> None:
    owned = owned_partition()
    owned.attempts = {3: 2, 99: 1}
    batch = batch_of(reading(), 5)
    tracker().prepare(batch, [owned])
    assert [record.attempts for record in batch.rows] == [0, 0, 0, 2, 0]
    assert [record.alone for record in batch.rows] == [False, False, False, True, False]


def test_record_that_is_alone_for_another_reason_stays_so() -> None:
    owned = owned_partition()
    owned.attempts = {3: 2}
    batch = batch_of(reading(), 2)
    batch.as_rows()[1].alone = True
    tracker().prepare(batch, [owned])
    assert [record.alone for record in batch.rows] == [False, True]


# --- what a new owner learns from the ledger ---


def row(unfinished: int = 0, suspects: range | None = None, deaths: int = 0) -> LedgerRow:
    return LedgerRow(3, "topic-1", 0, 10, 7, (), unfinished, suspects, deaths)


@pytest.mark.parametrize(("unfinished", "to_mark"), [(0, 0), (1, BATCH), (5, BATCH)])
def test_owner_marks_a_batch_worth_of_records_if_one_before_it_came_to_no_end(unfinished: int, to_mark: int) -> None:
    owned = owned_partition()
    tracker().taken_over(owned, row(unfinished), 10)
    assert owned.crashes.records_to_mark == to_mark


@pytest.mark.parametrize("suspects", [range(10, 12), range(9, 11), range(50, 51)])
def test_suspects_that_are_still_to_be_done_are_known_to_the_new_owner(suspects: range) -> None:
    owned = owned_partition()
    tracker().taken_over(owned, row(1, suspects, 4), 10)
    assert (owned.crashes.suspects, owned.crashes.deaths) == (suspects, 4)


@pytest.mark.parametrize("suspects", [None, range(3, 7), range(9, 10)])
def test_suspects_that_are_done_are_of_no_interest(suspects: range | None) -> None:
    owned = owned_partition()
    tracker().taken_over(owned, row(1, suspects, 4), 10)
    assert (owned.crashes.suspects, owned.crashes.deaths) == (None, 0)


# --- progress ---


@pytest.mark.parametrize(("to_mark", "count", "left"), [(500, 1, 499), (500, 500, 0), (500, 900, 0), (0, 10, 0)])
def test_each_record_that_comes_through_is_one_less_to_mark(to_mark: int, count: int, left: int) -> None:
    owned = owned_partition()
    owned.crashes.records_to_mark = to_mark
    tracker().committed(owned, 10, count)
    assert (owned.crashes.records_to_mark, owned.crashes.committed) == (left, True)


@pytest.mark.parametrize(("next_offset", "left"), [(5, range(5, 8)), (7, range(5, 8)), (8, None), (20, None)])
def test_suspects_are_cleared_when_the_last_of_them_has_come_through(next_offset: int, left: range | None) -> None:
    owned = suspected(range(5, 8), deaths=2)
    tracker().committed(owned, next_offset, 1)
    assert owned.crashes.suspects == left


# --- marks ---


async def test_batch_is_marked_if_any_of_its_partitions_has_something_to_mark(
    partitions: Partitions, take_over: TakeOver
) -> None:
    calm, dangerous = take_over(0, 1)
    dangerous.crashes.records_to_mark = 1
    both = Batch.of_rows([*records_of(current_reading(calm), 0), *records_of(current_reading(dangerous), 0)])
    tracking = tracker(partitions=partitions)
    assert tracking.marker(batch_of(current_reading(calm), 3)) is None
    assert tracking.marker(both) is not None
    dangerous.crashes.records_to_mark = 0
    assert tracking.marker(both) is None


def pieces(batch: Batch, owned: list[OwnedPartition], indices: list[int] | None = None) -> list[list[int]]:
    records = batch.as_rows()
    where = list(range(len(records))) if indices is None else indices
    return [list(piece) for piece in Marker(tracker(), owned).pieces(records, where)]


def test_neighbours_of_one_partition_are_marked_together() -> None:
    assert pieces(batch_of(reading(), 5), [suspected(None)]) == [[0, 1, 2, 3, 4]]
    assert pieces(batch_of(reading(), 5), [suspected(None)], []) == []


@pytest.mark.parametrize(
    ("count", "sizes"),
    [(1, [1]), (PIECE, [PIECE]), (PIECE + 1, [PIECE, 1]), (3 * PIECE - 1, [PIECE, PIECE, PIECE - 1])],
)
def test_piece_has_a_bound(count: int, sizes: list[int]) -> None:
    found = pieces(batch_of(reading(), count), [suspected(None)])
    assert [len(piece) for piece in found] == sizes
    assert [index for piece in found for index in piece] == list(range(count))


@pytest.mark.parametrize(
    ("suspects", "expected"),
    [
        (range(10, 11), [[0], [1, 2, 3, 4, 5]]),
        (range(15, 16), [[0, 1, 2, 3, 4], [5]]),
        (range(12, 14), [[0, 1], [2], [3], [4, 5]]),
        (range(99), [[0], [1], [2], [3], [4], [5]]),
        (range(16, 99), [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_each_suspect_is_marked_alone(suspects: range, expected: list[list[int]]) -> None:
    assert pieces(batch_of(reading(), 6, first=10), [suspected(suspects)]) == expected


def test_records_of_two_partitions_are_never_marked_together() -> None:
    def rows(of: Reading, *offsets: int) -> Batch:
        return Batch.of_rows(records_of(of, *offsets))

    batch = Batch([*rows(reading(0), 1, 2).spans, *rows(reading(1), 1, 2, 3).spans, *rows(reading(0), 3).spans])
    owned = [suspected(None, number=0), suspected(range(2, 3), number=1)]
    assert pieces(batch, owned) == [[0, 1], [2], [3], [4], [5]]


def test_only_records_that_are_handled_are_in_pieces() -> None:
    """The others are duplicates, or have failed already."""
    owned = [suspected(range(13, 14))]
    assert pieces(batch_of(reading(), 8, first=10), owned, [1, 2, 5, 7]) == [[1, 2, 5, 7]]
    assert pieces(batch_of(reading(), 8, first=10), owned, [1, 3, 4]) == [[1], [3], [4]]
