"""One span of owning one partition, as the threads that read it and the group know it."""

from __future__ import annotations

from dataclasses import dataclass, field

from processor.kafka.buffer import Buffer
from processor.messages.message import Partition
from processor.messages.record import Reading


@dataclass(slots=True, eq=False)
class Assignment:
    """Made on assign, closed on revoke or loss, and never used again: what still refers to a closed one is void."""

    partition: Partition
    owned: bool = True
    leaving: bool = False  # the group wants it back: nothing new is begun with it
    active: bool = False  # is being read, or about to be
    fetching: bool = False  # records come in
    users: int = 0  # batches, publications and recoveries that are working on it
    reading: Reading | None = None  # the current one, unless reading has stopped
    buffer: Buffer = field(default_factory=Buffer)
    read: int = 0  # the offset after the last record that was read, or where reading began
    empty: range = range(0)  # offsets known to hold no record for us: transaction markers and aborted records
    astray: str | None = None  # why nothing more can be read from there
