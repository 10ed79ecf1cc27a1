"""In which order partitions fill a batch."""

from __future__ import annotations

from processor.kafka.assignment import Assignment
from processor.kafka.turns import Turns
from processor.messages.message import Partition
from tests.support.readings import reading
from tests.support.spans import span


def waiting(*counts: int) -> list[Assignment]:
    """One partition for each number of waiting records."""
    assignments = []
    for number, count in enumerate(counts):
        assignment = Assignment(Partition("orders", number))
        if count:
            assignment.buffer.extend([span(reading(number), 0, count)])
        assignments.append(assignment)
    return assignments


def numbers(assignments: list[Assignment]) -> list[int]:
    return [assignment.partition.number for assignment in assignments]


def test_partitions_without_records_have_no_turn() -> None:
    assert Turns(100).order(waiting(0, 0)) == []


def test_partitions_that_are_up_to_date_never_wait_for_the_backlog_of_others() -> None:
    turns, assignments = Turns(100), waiting(500, 3, 500, 4)
    orders = [numbers(turns.order(assignments)) for _ in range(4)]
    assert {tuple(order[:2]) for order in orders} == {(1, 3)}


def test_partitions_with_a_backlog_take_turns() -> None:
    turns, assignments = Turns(100), waiting(500, 3, 500, 500)
    firsts = [numbers(turns.order(assignments))[1] for _ in range(6)]
    assert sorted(firsts) == [0, 0, 2, 2, 3, 3]


def test_those_that_are_up_to_date_leave_half_of_the_batch_to_the_others() -> None:
    assignments = waiting(12, 13, 12, 400)
    first = Turns(100).order(assignments)
    assert numbers(first)[:2] == [0, 2], "13 is more than an eighth of a hundred"
    assert sum(assignment.buffer.records for assignment in first[:2]) <= 50
