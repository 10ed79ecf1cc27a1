"""One period of owning one partition, as the poll thread and the group thread see it."""

from __future__ import annotations

from dataclasses import dataclass, field

from processor.kafka.buffer import Buffer
from processor.messages.message import Partition
from processor.messages.record import Reading


@dataclass(slots=True, eq=False)
class Assignment:
    """Made on assign, closed on revoke or loss, and never used again: anything that refers to a closed one is void."""

    partition: Partition
    owned: bool = True
    leaving: bool = False  # the group wants it back: no new work may begin on it
    active: bool = False  # is being read, or about to be
    fetching: bool = False  # librdkafka fetches its records
    users: int = 0  # batches, publications and recoveries that are working on it
    reading: Reading | None = None  # the current one; None while the partition is not read
    buffer: Buffer = field(default_factory=Buffer)
    read: int = 0  # the offset after the last record that was read, or the one where reading began
    current: bool = False  # less than a batch of it is waiting, here and at the broker
    empty: range = range(0)  # offsets known to hold no record for us: transaction markers and aborted records
    astray: str | None = None  # why nothing more can be read: the position is outside of the log
