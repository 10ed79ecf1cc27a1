"""Whose records a batch takes first."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processor.kafka.assignment import Assignment


class Turns:
    """Puts partitions in the order in which the next batch takes from them, as much of each as it has room for.

    Those that are up to date come first, and get half of a batch at most: a backlog in one partition, as after a
    process was killed, does not delay the others. Of those with a backlog another one is first each time, so that none
    starves. Taking a little of each would be as fair, but would split every batch into as many pieces, in the ledger
    and in memory.
    """

    def __init__(self, max_messages: int) -> None:
        self._max_messages = max_messages
        self._first = 0

    def order(self, assignments: Iterable[Assignment]) -> list[Assignment]:
        """Leave out those without records."""
        waiting = [assignment for assignment in assignments if assignment.buffer.records]
        few = self._max_messages // (2 * max(1, len(waiting)))
        current = [assignment for assignment in waiting if assignment.buffer.records <= few]
        behind = [assignment for assignment in waiting if assignment.buffer.records > few]
        self._first = (self._first + 1) % max(1, len(behind))
        return current + behind[self._first :] + behind[: self._first]
