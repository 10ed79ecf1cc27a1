"""What flows through the processor: partitions, messages as handlers see them, records as the engine does.

`Message`, `Output` and their like are the handlers' interface; everything else is the engine's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from processor.messages.message import Message, Partition, place

if TYPE_CHECKING:
    from processor.handling.effects import Effect
    from processor.handling.registry import Route
    from processor.kafka.assignment import Assignment


@dataclass(slots=True, frozen=True)
class Failure:
    """Why a message ends as a failed row. `reason` is a stable name, `detail` is for people.

    What comes from outside may hold half a surrogate pair, which has no UTF-8: it is made visible here, or the
    evidence could not be stored, and the message would come again for ever.
    """

    reason: str
    detail: str
    traceback: str | None = None
    kind: str = "poison"  # poison, transient or bug: see failures.py
    exception: str | None = None
    sqlstate: str | None = None

    def __post_init__(self) -> None:
        for name in ("detail", "traceback", "exception", "sqlstate"):
            if (text := getattr(self, name)) is not None:
                object.__setattr__(self, name, text.encode(errors="backslashreplace").decode())

    @property
    def way(self) -> tuple[str | None, ...]:
        """Messages that fail in the same way differ in the words at most."""
        return self.kind, self.reason, self.exception, self.sqlstate


@dataclass(slots=True, eq=False)
class Record:
    """A record on its way: what the handler gets, the bytes as they came, and what was decided."""

    message: Message[Any]
    key: bytes  # in the inbox
    payload: bytes | None
    payload_hash: int
    size: int
    route: Route | None
    in_inbox: bool  # False for a type that does without
    failure: Failure | None
    assignment: Assignment
    collided: bool = False
    redriven: bool = False  # sent once more by an operator
    foreign: bool = False  # sent once more for another consumer of the topic: not for us
    parked: bool = False  # has to wait behind a failed message of its key
    elsewhere: bool = False  # has its row in another partition, where it was first seen
    alone: bool = False  # to be processed in a transaction of its own, its start on record: it has a history
    attempts: int = 0  # that failed before, as far as is known
    starts: int = 0  # that came to no end: they took the process with them
    begun: bool = False  # our own start is on record
    first_failed_at: datetime | None = None
    failed_as: frozenset[tuple[str | None, ...]] = frozenset()  # the ways in which it failed for good before
    effect: Effect | None = None  # what its handler did outside already

    @property
    def partition(self) -> Partition:
        return Partition(self.message.topic, self.message.partition)

    @property
    def next_offset(self) -> int:
        return self.message.offset + 1

    @property
    def acts(self) -> bool:
        """Whether its handler acts outside of the database."""
        return self.route is not None and self.route.effect

    @property
    def handler(self) -> str:
        """Its name, for people."""
        return self.route.name if self.route else "no handler"

    @property
    def coordinates(self) -> str:
        """For people; what is stored under a name needs `place`."""
        return f"{self.message.topic}:{self.message.partition}:{self.message.offset}"

    @property
    def place(self) -> str:
        message = self.message
        return place(message.topic, self.assignment.topic_id, message.partition, message.offset)
