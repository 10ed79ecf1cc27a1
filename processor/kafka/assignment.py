"""One span of owning one partition."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from processor.kafka.buffer import Buffer
from processor.messages.message import Partition

if TYPE_CHECKING:
    from processor.engine.failing.budget import Budget


@dataclass(slots=True, eq=False)
class Assignment:
    partition: Partition
    owned: bool = True
    leaving: bool = False  # the group wants it back: nothing new is begun with it
    fetching: bool = False
    active: bool = False  # is being read, or about to be
    epoch: int = 0
    source: int = 0  # the partition's name in the inbox
    topic_id: str = ""  # of the topic that is read; another one may get the name
    position: int = 0  # the offset after the last record that Postgres has committed
    published: int = 0  # everything below is known to be in Kafka
    silent_below: int = 0
    users: int = 0  # batches, publications and recoveries at work on it
    known: bool = False  # it has been recovered before
    begun: bool = False  # it is on record that we work on it
    committed: bool = False  # we have committed a batch of it
    caution: int = 0  # of so many records it is told when they are tried: one of them may have killed our predecessors
    suspect: range | None = None  # the offsets that the last of those was at
    deaths: int = 0  # so many of them in a row, at just these
    outages: int = 0  # in a row
    halted: str | None = None  # why it goes no further, if an operator has to look at it
    parked_keys: set[bytes] = field(default_factory=set)  # of which later messages have to wait
    attempts: dict[int, int] = field(default_factory=dict)  # by offset: that failed, of types without inbox
    budget: Budget | None = None
    buffer: Buffer = field(default_factory=Buffer)
    read: int = 0  # the offset after the last record that was read, or where reading began
    empty: range = range(0)  # offsets known to hold no record for us: markers of transactions, and what was aborted
    astray: str | None = None  # why nothing more can be read from there
    reading: int = 0  # which one it is: the first, or one that began anew after what was read ahead was forgotten
