"""How much of each partition goes into the next batch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processor.kafka.assignment import Assignment

# While some partitions have a backlog and others are up to date, a batch is this much shorter.
SHORTER = 4


@dataclass(frozen=True, slots=True)
class Share:
    assignment: Assignment
    most: int  # records
    max_bytes: int  # they begin within these


class Turns:
    """Lets partitions take turns.

    Where all of them have a backlog, or none, each may fill a batch, and another one is first each time, so that none
    starves. Taking a little of each would be as fair, but would split every batch into as many pieces, in the ledger
    and in memory.

    Where only some have a backlog, as after a process was killed, the others must not wait for it: batches are short
    then, and those that are up to date come first. They get half of a batch at most, so that the backlog shrinks.
    Batches of a few messages are short enough as they are.
    """

    def __init__(self, max_messages: int, max_bytes: int) -> None:
        self._max_messages = max_messages
        self._max_bytes = max_bytes
        self._turn = 0

    def next(self, assignments: Iterable[Assignment]) -> tuple[int, list[Share]]:
        """Return the most records of the next batch, and the share of each partition that has any."""
        waiting = [assignment for assignment in assignments if assignment.buffer.records]
        current = [assignment for assignment in waiting if assignment.current]
        behind = [assignment for assignment in waiting if not assignment.current]
        most = self._max_messages // SHORTER
        fair = most // 2 // max(1, len(current))
        self._turn += 1
        if not (current and behind and fair):
            most = self._max_messages
            return most, [Share(one, most, self._max_bytes) for one in self._rotated(waiting)]
        fair_bytes = max(1, self._max_bytes // 2 // len(current))
        shares = [Share(one, fair, fair_bytes) for one in self._rotated(current)]
        return most, shares + [Share(one, most, self._max_bytes) for one in self._rotated(behind)]

    def _rotated(self, assignments: list[Assignment]) -> list[Assignment]:
        first = self._turn % max(1, len(assignments))
        return assignments[first:] + assignments[:first]
