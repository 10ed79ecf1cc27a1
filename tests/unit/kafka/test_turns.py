"""How much of each partition goes into the next batch."""

from __future__ import annotations

from processor.kafka.assignment import Assignment
from processor.kafka.turns import Share, Turns
from processor.messages.message import Partition
from tests.support.readings import reading
from tests.support.spans import span

MOST = 100
BYTES = 10_000


def waiting(*counts: int) -> list[Assignment]:
    """One partition for each number of waiting records; a hundred are a backlog."""
    assignments = []
    for number, count in enumerate(counts):
        assignment = Assignment(Partition("orders", number), current=count < MOST)
        if count:
            assignment.buffer.extend([span(reading(number), 0, count)])
        assignments.append(assignment)
    return assignments


def numbers(shares: list[Share]) -> list[int]:
    return [share.assignment.partition.number for share in shares]


def test_partitions_without_records_have_no_share() -> None:
    assert Turns(MOST, BYTES).next(waiting(0, 0)) == (MOST, [])
    assert numbers(Turns(MOST, BYTES).next(waiting(0, 7, 0))[1]) == [1]


def test_partitions_with_a_backlog_take_turns_at_filling_a_batch() -> None:
    turns, assignments = Turns(MOST, BYTES), waiting(500, 600, 700)
    found = [turns.next(assignments) for _ in range(6)]
    assert sorted(numbers(shares)[0] for _, shares in found) == [0, 0, 1, 1, 2, 2]
    assert {most for most, _ in found} == {MOST}
    assert {share.most for _, shares in found for share in shares} == {MOST}


def test_partitions_that_are_up_to_date_may_fill_a_batch_together() -> None:
    most, shares = Turns(MOST, BYTES).next(waiting(60, 70))
    assert (most, sorted(numbers(shares))) == (MOST, [0, 1])
    assert {share.most for share in shares} == {MOST}


def test_those_that_are_up_to_date_do_not_wait_for_the_backlog_of_others() -> None:
    turns, assignments = Turns(MOST, BYTES), waiting(500, 60, 500, 4)
    found = [turns.next(assignments) for _ in range(4)]
    assert {most for most, _ in found} == {25}
    assert {frozenset(numbers(shares)[:2]) for _, shares in found} == {frozenset({1, 3})}
    assert sorted(numbers(shares)[2] for _, shares in found) == [0, 0, 2, 2]


def test_those_that_are_up_to_date_leave_half_of_a_batch_to_the_backlog() -> None:
    most, shares = Turns(MOST, BYTES).next(waiting(60, 70, 80, 500))
    assert sum(share.most for share in shares[:3]) <= most // 2
    assert sum(share.max_bytes for share in shares[:3]) <= BYTES // 2
    assert (shares[3].most, shares[3].max_bytes) == (most, BYTES)


def test_batches_of_one_message_are_still_taken_from_everybody() -> None:
    turns, assignments = Turns(1, BYTES), waiting(1, 1, 500)
    found = [turns.next(assignments) for _ in range(6)]
    assert sorted(numbers(shares)[0] for _, shares in found) == [0, 0, 1, 1, 2, 2]
    assert {most for most, _ in found} == {1}
