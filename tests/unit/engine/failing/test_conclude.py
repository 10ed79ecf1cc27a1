"""What a batch ends with: who failed and who waits, when that is too much, and which dead letters join the outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from processor.engine.failing.budget import Budget
from processor.engine.failing.conclude import Conclusion, Ends, _ends
from processor.engine.failing.outcomes import Exhausted, Stop
from processor.engine.partitions import OwnedPartition, Partitions
from processor.handling.result import BatchResult
from processor.kafka.cluster import Cluster
from processor.messages.batch import Batch
from processor.messages.outputs import DEAD_LETTER, EncodedOutputs, Outgoing
from processor.postgres.claims import Claims
from tests.support.readings import reading
from tests.support.spans import span
from tests.unit.engine.conftest import TakeOver
from tests.unit.engine.given import FAILURE, UNUSED, batch_of, current_reading, offsets, records_of, settings

MADE = Outgoing(0, "invoices", None, b"{}", "cause", 0, "id")


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Nobody asks the brokers about a batch without outputs."""
    cluster = Cluster(settings().kafka, "c")
    yield cluster
    cluster.close()


def conclusion(partitions: Partitions, cluster: Cluster = UNUSED, **failure: Any) -> Conclusion:
    return Conclusion(settings(failure=failure), partitions, cluster, lambda _: None)


def all_of(batch: Batch) -> Claims:
    return Claims(list(range(len(batch))))


def with_failures(owned: OwnedPartition, count: int, *failed: int, first: int = 0) -> Batch:
    """Records of a partition, of which some have failed."""
    rows = records_of(current_reading(owned), *range(first, first + count))
    for record in rows:
        if record.message.offset in failed:
            record.failure = FAILURE
    return Batch.of_rows(rows)


def with_budgets(taken: Sequence[OwnedPartition], most: int) -> Sequence[OwnedPartition]:
    for owned in taken:
        owned.budget = Budget(settings(failure={"budget_consecutive": most}).failure)
    return taken


def spent(owned: OwnedPartition, most: int) -> int:
    """How many failures of the partition in a row count for its budget."""
    return most - next(more for more in range(most + 1) if owned.budget.exceeded([True] * (more + 1)))


# --- ends ---


def test_batch_in_columns_ends_as_completed_and_stays_in_columns() -> None:
    batch = batch_of(reading(), 3)
    assert _ends(batch, all_of(batch)) == Ends()
    assert batch.columns is not None


def test_records_that_failed_are_separate_from_those_that_wait_and_from_the_completed() -> None:
    rows = records_of(reading(), *range(6))
    rows[1].failure = rows[4].failure = rows[5].failure = FAILURE
    rows[2].parked = rows[4].parked = True
    batch = Batch.of_rows(rows)
    ends = _ends(batch, all_of(batch))
    assert (offsets(ends.failed), offsets(ends.parked)) == ([1, 5], [2, 4]), "what waits has not failed yet"
    assert offsets(ends.undone) == [1, 5, 2, 4]


def test_records_that_are_not_ours_to_do_have_no_end_here() -> None:
    """A duplicate of a message may be undecodable, and still its row says what became of it."""
    rows = records_of(reading(), *range(4))
    rows[0].failure = rows[3].failure = FAILURE
    rows[1].parked = True
    ends = _ends(Batch.of_rows(rows), Claims([2, 3]))
    assert (offsets(ends.failed), offsets(ends.parked)) == ([3], [])


async def test_batch_without_outputs_and_failures_may_be_committed(partitions: Partitions, cluster: Cluster) -> None:
    batch = batch_of(reading(), 3)
    assert await conclusion(partitions, cluster).conclude(batch, all_of(batch), BatchResult()) == Ends()


async def test_failed_batch_may_be_committed_within_the_budget(
    partitions: Partitions, cluster: Cluster, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    batch, result = with_failures(owned, 3, 1), BatchResult()
    ends = await conclusion(partitions, cluster, dead_letter_topic="").conclude(batch, all_of(batch), result)
    assert isinstance(ends, Ends)
    assert (offsets(ends.failed), result.outgoing) == ([1], {})


# --- policy: halt ---


async def test_policy_halt_stops_at_the_first_failure(partitions: Partitions, take_over: TakeOver) -> None:
    (owned,) = take_over(0)
    batch = with_failures(owned, 5, 2, 3)
    found = await conclusion(partitions, policy="halt").conclude(batch, all_of(batch), BatchResult())
    assert found == Stop(batch.rows[2])


async def test_policy_halt_goes_on_past_what_only_waits(
    partitions: Partitions, cluster: Cluster, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    batch = with_failures(owned, 2)
    batch.rows[1].parked = True
    ends = await conclusion(partitions, cluster, policy="halt").conclude(batch, all_of(batch), BatchResult())
    assert ends == Ends([], [batch.rows[1]])


# --- the budget ---


async def test_too_many_failures_in_a_partition_exhaust_it_and_send_no_letter(
    partitions: Partitions, take_over: TakeOver
) -> None:
    first, second = with_budgets(take_over(0, 1), most=2)
    rows = [*with_failures(first, 5, 1, 3).rows, *with_failures(second, 5, 1, 2, 3).rows]
    batch, result = Batch.of_rows(rows), BatchResult()
    found = await conclusion(partitions).conclude(batch, all_of(batch), result)
    assert found == Exhausted(second, "more than 2 messages in a row failed (failure.budget_consecutive)")
    assert result.outgoing == {}
    assert (spent(first, 2), spent(second, 2)) == (0, 0), "it is rolled back, and counts for nothing"


async def test_failures_of_batches_that_were_committed_count(
    partitions: Partitions, cluster: Cluster, take_over: TakeOver
) -> None:
    (owned,) = with_budgets(take_over(0), most=2)
    concluding = conclusion(partitions, cluster, dead_letter_topic="")
    for first, expected in ((0, Ends), (10, Ends), (20, Exhausted)):
        batch = with_failures(owned, 1, first, first=first)
        ends = await concluding.conclude(batch, all_of(batch), BatchResult())
        assert type(ends) is expected
        if isinstance(ends, Ends):
            concluding.count(batch, ends)


async def test_committed_batch_counts_in_each_of_its_partitions(partitions: Partitions, take_over: TakeOver) -> None:
    first, second, third = with_budgets(take_over(0, 1, 2), most=9)
    third.budget.count([True] * 4)
    concluding = conclusion(partitions)
    rows = [*with_failures(first, 4, 2, 3).rows, *with_failures(second, 4, 3).rows, *with_failures(third, 1).rows]
    concluding.count(Batch.of_rows(rows), Ends([record for record in rows if record.failure]))
    assert (spent(first, 9), spent(second, 9), spent(third, 9)) == (2, 1, 0)


async def test_committed_batch_without_a_failure_ends_every_row_of_failures_and_stays_in_columns(
    partitions: Partitions, take_over: TakeOver
) -> None:
    first, second = with_budgets(take_over(0, 1), most=9)
    for owned in (first, second):
        owned.budget.count([True] * 4)
    batch = Batch([span(current_reading(first), 0, 2)])
    conclusion(partitions).count(batch, Ends())
    assert (spent(first, 9), spent(second, 9)) == (0, 4)
    assert batch.columns is not None


async def test_message_that_an_operator_sends_again_was_counted_the_first_time(
    partitions: Partitions, cluster: Cluster, take_over: TakeOver
) -> None:
    (owned,) = with_budgets(take_over(0), most=2)
    batch = with_failures(owned, 5, *range(5))
    for record in batch.rows:
        record.redriven = record.message.offset != 2
    concluding = conclusion(partitions, cluster, dead_letter_topic="")
    ends = await concluding.conclude(batch, all_of(batch), BatchResult())
    assert isinstance(ends, Ends)
    concluding.count(batch, ends)
    assert spent(owned, 2) == 1


# --- dead letters ---


def letters_of(
    partitions: Partitions, batch: Batch, *, made: Sequence[Outgoing] = (), **failure: Any
) -> list[tuple[int, str, int]]:
    """Offset, topic and place of all that the batch sends."""
    result = BatchResult()
    if made:
        result.add(batch.rows[0].partition, EncodedOutputs.of(made))
    conclusion(partitions, **failure)._write_letters(result, [record for record in batch.rows if record.failure])
    return [(one.source_offset, one.topic, one.place) for sent in result.outgoing.values() for one in sent]


async def test_failed_message_gets_a_dead_letter_in_its_place_among_the_outputs(
    partitions: Partitions, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    made = [MADE._replace(source_offset=offset) for offset in (0, 2, 4)]
    assert letters_of(partitions, with_failures(owned, 5, 1, 3), made=made) == [
        (0, "invoices", 0),
        (1, "orders.c.dlq", DEAD_LETTER),
        (2, "invoices", 0),
        (3, "orders.c.dlq", DEAD_LETTER),
        (4, "invoices", 0),
    ]


@pytest.mark.parametrize(
    ("pattern", "topics"),
    [("", []), ("failed", ["failed"]), ("{topic}.{consumer}.dlq", ["orders.c.dlq"])],
)
async def test_dead_letter_goes_to_the_configured_topic_if_there_is_one(
    partitions: Partitions, take_over: TakeOver, pattern: str, topics: list[str]
) -> None:
    (owned,) = take_over(0)
    sent = letters_of(partitions, with_failures(owned, 2, 1), dead_letter_topic=pattern)
    assert [topic for _, topic, _ in sent] == topics


@pytest.mark.parametrize(("earlier", "letters"), [(FAILURE.way, 0), (("bug", *FAILURE.way[1:]), 1), (None, 1)])
async def test_message_that_fails_again_gets_a_letter_only_if_it_fails_in_a_new_way(
    partitions: Partitions, take_over: TakeOver, earlier: tuple[str | None, ...] | None, letters: int
) -> None:
    (owned,) = take_over(0)
    batch = with_failures(owned, 1, 0)
    batch.rows[0].failed_as = frozenset([earlier] if earlier else [])
    assert len(letters_of(partitions, batch)) == letters


async def test_letters_of_records_that_are_only_applied_again_are_not_sent_twice(
    partitions: Partitions, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    owned.silent_below = 3
    sent = letters_of(partitions, with_failures(owned, 5, *range(5)))
    assert [offset for offset, _, _ in sent] == [3, 4]


async def test_letters_of_several_partitions_go_with_their_own_offsets(
    partitions: Partitions, take_over: TakeOver
) -> None:
    first, second = take_over(0, 1)
    batch, result = Batch.of_rows([*with_failures(first, 2, 1).rows, *with_failures(second, 2, 0).rows]), BatchResult()
    conclusion(partitions)._write_letters(result, [record for record in batch.rows if record.failure])
    assert {partition: sent.offsets for partition, sent in result.outgoing.items()} == {
        first.partition: [1],
        second.partition: [0],
    }
