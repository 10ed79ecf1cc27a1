"""What may become of a batch, or of the part of it that was tried. The loop matches on these."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition
    from processor.messages.record import Record


@dataclass(frozen=True, slots=True)
class Committed:
    """Postgres has it: it is done, whatever happens."""


@dataclass(frozen=True, slots=True)
class Cut:
    """It has to be committed in two: the records before this one, and those from it on."""

    index: int


@dataclass(frozen=True, slots=True)
class Again:
    """Nobody is at fault: the same once more, after a moment."""

    reason: str
    careful_with: str | None = None  # a statement; from now on it is sent so that it shows whose write is refused


@dataclass(frozen=True, slots=True)
class Culprit:
    """One record is known to be at fault."""

    index: int
    error: Exception


@dataclass(frozen=True, slots=True)
class Unattributed:
    """Some record is at fault."""

    error: Exception


@dataclass(frozen=True, slots=True)
class Wait:
    """Nobody is at fault, but it will take a while: these partitions wait, all of the batch if none is named."""

    reason: str
    partitions: Sequence[OwnedPartition] | None = None
    seconds: float | None = None  # None: it is not known how long
    outage: bool = True


@dataclass(frozen=True, slots=True)
class Exhausted:
    """Too many messages of a partition have failed."""

    partition: OwnedPartition
    reason: str


@dataclass(frozen=True, slots=True)
class Stop:
    """By policy, the partition goes no further than to this record, which has failed."""

    record: Record


Outcome: TypeAlias = Committed | Cut | Again | Culprit | Unattributed | Wait | Exhausted | Stop
