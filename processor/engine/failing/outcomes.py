"""What may become of a part of a batch, and what is done about it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from processor.errors import text_of

if TYPE_CHECKING:
    from processor.kafka.assignment import Assignment
    from processor.messages.record import Record


class Unattributed(Exception):
    """Some record is at fault."""

    def __init__(self, error: Exception) -> None:
        super().__init__(text_of(error))
        self.error = error


class Wait(Exception):
    """Nobody is at fault, but it will take a while: these partitions wait, for so long if it is known."""

    def __init__(
        self, reason: str, assignments: Sequence[Assignment], seconds: float | None = None, *, outage: bool = True
    ) -> None:
        super().__init__(reason)
        self.assignments = assignments
        self.seconds = seconds
        self.outage = outage


class Exhausted(Exception):
    """Too many messages of a partition have failed."""

    def __init__(self, assignment: Assignment, reason: str) -> None:
        super().__init__(reason)
        self.assignment = assignment


class Stop(Exception):
    """By policy, the partition goes no further than to this record, which has failed."""

    def __init__(self, record: Record) -> None:
        super().__init__(record.coordinates)
        self.record = record
