"""The outcomes of an attempt to commit a batch, or a part of it. The loop matches on these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition
    from processor.messages.record import Record


@dataclass(frozen=True, slots=True)
class Committed:
    """Postgres has committed it: it is done, whatever happens."""


@dataclass(frozen=True, slots=True)
class Cut:
    """It has to be committed in two parts: the records before this one, and those from it on."""

    index: int


@dataclass(frozen=True, slots=True)
class Again:
    """No message is at fault: the same again, after a moment."""

    reason: str
    careful_with: str | None = None  # a statement to send, from now on, so that a refused write shows its message


@dataclass(frozen=True, slots=True)
class Culprit:
    """One record is known to be at fault."""

    index: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Unattributed:
    """Some record is at fault, but it is not known which."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Wait:
    """No message is at fault, but it will take a while: these partitions wait, all of the batch if None."""

    reason: str
    partitions: Sequence[OwnedPartition] | None = None
    seconds: float | None = None  # None: unknown
    outage: bool = True


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Too many messages of a partition have failed: it halts."""

    partition: OwnedPartition
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """This record has failed, and by policy its partition halts before it."""

    record: Record


Outcome: TypeAlias = Committed | Cut | Again | Culprit | Unattributed | Wait | Exhausted | Stop
