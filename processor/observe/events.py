"""The facts that the engine reports, one class for each kind.

The engine emits events and knows no listener. Logs and counters listen. A class's name in snake case is the event's
name in the logs, and its fields are the fields of the line. Both are an interface: operators search for them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeAlias


@dataclass(frozen=True)
class Event:
    name: ClassVar[str]
    level: ClassVar[str]  # of its line in the log

    def __init_subclass__(cls, level: str = "info") -> None:
        cls.level = level
        cls.name = re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower()

    @property
    def severity(self) -> str:
        return self.level

    def data(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


Listener: TypeAlias = Callable[[Event], None]
Emit: TypeAlias = Callable[[Event], None]


class Events:
    """Passes each event on to all listeners, at once and in their order."""

    def __init__(self, *listeners: Listener) -> None:
        self._listeners = listeners

    def __call__(self, event: Event) -> None:
        for listener in self._listeners:
            listener(event)


# --- batches and messages ---


@dataclass(frozen=True)
class BatchCommitted(Event, level="debug"):
    records: int
    completed: int
    duplicates: int
    failed: int
    parked: int
    collisions: int
    outputs: int
    round_trips: Mapping[str, int]  # to Postgres, by their purpose: see postgres/roundtrips.py


@dataclass(frozen=True)
class BatchRetried(Event):
    """A batch failed without a message at fault, and is tried again."""

    reason: str
    times: int
    records: int


@dataclass(frozen=True)
class MessageFailed(Event, level="warning"):
    """A message failed for good and is kept as a failed row."""

    message_id: str
    at: str
    reason: str
    detail: str


@dataclass(frozen=True)
class MessageRetried(Event):
    message_id: str
    at: str
    attempt: int
    seconds: float
    reason: str


@dataclass(frozen=True)
class MessageParked(Event):
    message_id: str
    at: str


@dataclass(frozen=True)
class MessageCollided(Event, level="warning"):
    message_id: str
    at: str


@dataclass(frozen=True)
class RollbackFailed(Event, level="debug"):
    error: str


@dataclass(frozen=True)
class AttemptsNotEnded(Event, level="debug"):
    reason: str


@dataclass(frozen=True)
class AttemptsNotAbandoned(Event, level="debug"):
    reason: str


# --- leases of effects ---


@dataclass(frozen=True)
class LeaseExpired(Event, level="warning"):
    """A lease ran out, so its owner must have died: the message is tried again."""

    message_id: str


@dataclass(frozen=True)
class LeaseNotRenewed(Event, level="warning"):
    message_id: str
    reason: str


@dataclass(frozen=True)
class NothingReaped(Event, level="warning"):
    reason: str


# --- partitions ---

# What recovery finds in normal operation; an operator should look at anything else.
ORDINARY_FINDINGS = ("first_start", "partition_added", "in_step", "died_between_commits")


@dataclass(frozen=True)
class PartitionReady(Event):
    """Both systems are in step, and reading begins."""

    partition: str
    found: str  # by recovery
    start: int

    @property
    def severity(self) -> str:
        return "info" if self.found in ORDINARY_FINDINGS else "warning"


@dataclass(frozen=True)
class PartitionHeld(Event):
    """A partition waits, and is read again after this time."""

    partition: str
    seconds: float
    reason: str


@dataclass(frozen=True)
class PartitionHalted(Event, level="error"):
    """A partition stops until an operator has looked at it."""

    partition: str
    reason: str


@dataclass(frozen=True)
class TroublesNotWritten(Event, level="debug"):
    reason: str


@dataclass(frozen=True)
class StartingOver(Event, level="warning"):
    reason: str
    kind: str
    partitions: Sequence[str]


@dataclass(frozen=True)
class RecoveryRetried(Event, level="warning"):
    reason: str
    tries: int
    partitions: Sequence[str]


@dataclass(frozen=True)
class StoredOutputsSent(Event):
    outputs: int


@dataclass(frozen=True)
class FrozenSessionEnded(Event, level="warning"):
    backend: int


# --- retention ---


@dataclass(frozen=True)
class RetentionPruned(Event):
    """A round through the inbox is over."""

    deleted: int  # rows
    before: str  # what was last seen before this time went
    pages: int
    seconds: float
    archive: str | None  # the file that has the rows


@dataclass(frozen=True)
class RetentionHeld(Event):
    """Nothing is forgotten for now, because something may still come; reported once per reason."""

    reason: str


@dataclass(frozen=True)
class RetentionSlow(Event, level="warning"):
    """A round took longer than the time between two: rows stay longer than they should. Raise `retention.pace`."""

    seconds: float
    period: float


@dataclass(frozen=True)
class RetentionFailed(Event, level="warning"):
    """A round was given up, and goes on later."""

    reason: str


# --- the process ---


@dataclass(frozen=True)
class Started(Event):
    consumer: str
    topics: Sequence[str]
    pid: int


@dataclass(frozen=True)
class Progress(Event):
    records: int
    completed: int
    duplicates: int
    failed: int
    parked: int
    retried: int
    collisions: int
    outputs: int
    batches: int
    round_trips: Mapping[str, int]  # those of all batches


@dataclass(frozen=True)
class ProducerNotReady(Event, level="warning"):
    reason: str


@dataclass(frozen=True)
class PublicationFailed(Event, level="error"):
    """A bug of ours stopped publishing: the outputs are stored, and recovery sends them."""

    exc_info: BaseException


@dataclass(frozen=True)
class OrphansNotSeen(Event, level="debug"):
    reason: str


@dataclass(frozen=True)
class LeftToRecovery(Event, level="warning"):
    reason: str
