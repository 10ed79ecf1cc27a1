"""The partitions that are ours, as the engine knows them: how far their work is, and what holds it up.

What the reader knows about the same partition is in its `Assignment`; records refer to its immutable `Reading`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from processor.engine.failing.budget import Budget
from processor.messages.record import Reading

if TYPE_CHECKING:
    from processor.kafka.assignment import Assignment
    from processor.kafka.reader import PartitionReader
    from processor.messages.message import Partition
    from processor.settings.schema import FailureSettings


class Obstacle(StrEnum):
    """What a partition waits for, the most serious first. The words are those that `processor status` shows."""

    HALTED = "halted"  # an operator
    RECOVERING = "recovering"  # another try of its recovery
    OUTAGE = "outage"  # something that its handler, or its batch, needs
    RETRY = "retry"  # another try of one message


@dataclass(frozen=True, slots=True)
class Trouble:
    reason: str
    since: datetime


@dataclass(slots=True)
class CrashHistory:
    """What is known about owners that died while working on a partition; see crashes.py."""

    on_record: bool = False  # the ledger knows that we work on it: if we die before our first commit, so does the next
    committed: bool = False  # we have committed a batch of it
    records_to_mark: int = 0  # this many may hold the one that killed our predecessors: they are marked while handled
    suspects: range | None = None  # the offsets in progress when the last predecessor died
    deaths: int = 0  # owners in a row that died at exactly these offsets


@dataclass(slots=True, eq=False)
class OwnedPartition:
    assignment: Assignment
    budget: Budget
    epoch: int = 0
    ledger_id: int = 0  # the number of its ledger row, and of its stored outputs
    partition_id: int = 0  # its number in the inbox: the same, except for a replay
    topic_id: str = ""  # of the topic that is read; a recreated topic has another one
    position: int = 0  # the offset after the last record that Postgres has committed
    published: int = 0  # everything below is known to be in Kafka
    silent_below: int = 0  # outputs of records below are not sent again
    recovered: bool = False  # at least once
    recovering: bool = False  # a recovery is working on it: nothing else may begin to read it
    outages: int = 0  # in a row
    parked_keys: set[bytes] = field(default_factory=set)  # digests of keys whose later messages have to wait
    attempts: dict[int, int] = field(default_factory=dict)  # failed attempts by offset, of types without inbox
    crashes: CrashHistory = field(default_factory=CrashHistory)
    troubles: dict[Obstacle, Trouble] = field(default_factory=dict)  # why it stands still

    @property
    def halted(self) -> str | None:
        """The reason why it waits for an operator."""
        trouble = self.troubles.get(Obstacle.HALTED)
        return None if trouble is None else trouble.reason

    @property
    def trouble(self) -> tuple[Obstacle, Trouble] | None:
        """The most serious of its troubles."""
        return next(((kind, self.troubles[kind]) for kind in Obstacle if kind in self.troubles), None)

    def obstruct(self, kind: Obstacle, reason: str) -> None:
        """Note why it stands still, until this is cleared. A newer reason of the same kind keeps the older time."""
        known = self.troubles.get(kind)
        self.troubles[kind] = Trouble(reason, known.since if known else datetime.now(UTC))

    def clear(self, *kinds: Obstacle) -> None:
        for kind in kinds:
            self.troubles.pop(kind, None)

    @property
    def partition(self) -> Partition:
        return self.assignment.partition

    @property
    def owned(self) -> bool:
        return self.assignment.owned

    @property
    def leaving(self) -> bool:
        return self.assignment.leaving

    @property
    def at_its_end(self) -> bool:
        """Whether nothing more will be done here: all up to its end is, or only an operator can go on."""
        if self.halted is not None:
            return True
        end, empty = self.assignment.end, self.assignment.empty
        if end is None or not self.recovered or self.recovering:
            return False
        return self.position >= end or (self.position in empty and empty.stop >= end)


class Partitions:
    def __init__(self, settings: FailureSettings, reader: PartitionReader) -> None:
        self._settings = settings
        self._reader = reader
        self._by_assignment: dict[Assignment, OwnedPartition] = {}
        # Weak: after its end, a reading lives only as long as batches with its records.
        self._by_reading: WeakKeyDictionary[Reading, OwnedPartition] = WeakKeyDictionary()

    def of(self, reading: Reading) -> OwnedPartition:
        return self._by_reading[reading]

    def take_new(self) -> list[OwnedPartition]:
        """Return the partitions assigned since the last call: they have to be recovered."""
        self._by_assignment = {at: known for at, known in self._by_assignment.items() if at.owned}
        return self._known(self._reader.take_new())

    def owned(self) -> list[OwnedPartition]:
        return self._known(self._reader.owned())

    def at_their_ends(self) -> bool:
        owned = self.owned()
        return bool(owned) and all(partition.at_its_end for partition in owned)

    def active(self) -> list[OwnedPartition]:
        return [partition for partition in self.owned() if partition.assignment.active]

    def begin(self, partition: OwnedPartition, offset: int) -> None:
        """Read a partition from this offset on."""
        partition.position = offset
        reading = Reading(
            partition.partition, partition.partition_id, partition.topic_id, partition.epoch, partition.ledger_id
        )
        self._by_reading[reading] = partition
        self._reader.begin(partition.assignment, reading, offset)

    def suspend(self, partitions: Iterable[OwnedPartition]) -> None:
        """Stop reading these, and forget what was read ahead."""
        self._reader.suspend([partition.assignment for partition in partitions])

    def use(self, partitions: Iterable[OwnedPartition]) -> None:
        """Keep these from being given back until they are released, for a bounded time."""
        self._reader.use([partition.assignment for partition in partitions])

    def using(self, partitions: Iterable[OwnedPartition]) -> AbstractContextManager[None]:
        """Use partitions for a while; raise Fenced if one of them has to be given back."""
        return self._reader.using([partition.assignment for partition in partitions])

    def release(self, partitions: Iterable[OwnedPartition]) -> None:
        self._reader.release([partition.assignment for partition in partitions])

    def take_astray(self) -> dict[OwnedPartition, str]:
        """Return partitions whose position is outside the log, and why, once all records read are processed."""
        found = self._reader.take_astray()
        return dict(zip(self._known(found), found.values(), strict=True))

    def _known(self, assignments: Collection[Assignment]) -> list[OwnedPartition]:
        for assignment in assignments:
            if assignment not in self._by_assignment:
                self._by_assignment[assignment] = OwnedPartition(assignment, Budget(self._settings))
        return [self._by_assignment[assignment] for assignment in assignments]
