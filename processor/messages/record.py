"""A record on its way through the engine, and the reading of the partition that delivered it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any

from processor.messages.failure import Failure
from processor.messages.message import Message, Partition, place

if TYPE_CHECKING:
    from processor.messages.types import MessageType


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Reading:
    """One uninterrupted reading of a partition: what its records have in common.

    Recovery and the end of a pause begin a new reading. Records of an older one are void, because the new one
    delivers them again.
    """

    partition: Partition
    partition_id: int  # the partition's number in the inbox
    topic_id: str  # differs from that of an earlier topic of the same name
    epoch: int  # of the owner
    ledger_id: int  # the number of the ledger row that proves who owns it; for the live service the same


@dataclass(slots=True, eq=False)
class Record:
    """The message for the handler, its bytes as they came, and what was decided about it."""

    message: Message[Any]
    key: bytes  # in the inbox
    payload: bytes | None
    payload_hash: int
    size: int
    message_type: MessageType | None  # None: there is no handler for it
    in_inbox: bool  # False for a type that does without the inbox
    failure: Failure | None
    reading: Reading
    collided: bool = False
    redriven: bool = False  # an operator sent it again
    not_ours: bool = False  # is sent again for another consumer of the topic, or a replay leaves it out: skipped
    parked: bool = False  # has to wait behind a failed message of its key
    elsewhere: bool = False  # its row belongs to another partition, where the message was first seen
    alone: bool = False  # it failed before or killed a process: it runs in a transaction of its own, its start recorded
    attempts: int = 0  # known attempts that failed before
    unfinished: int = 0  # attempts that never ended: the process died during them
    begun: bool = False  # the start of our own attempt is on record
    first_failed_at: datetime | None = None
    failed_as: frozenset[tuple[str | None, ...]] = frozenset()  # `Failure.way` of each earlier final failure

    @property
    def partition(self) -> Partition:
        return self.reading.partition

    @property
    def next_offset(self) -> int:
        return self.message.offset + 1

    @property
    def acts(self) -> bool:
        """Whether its handler acts outside the database."""
        return self.message_type is not None and self.message_type.acts

    @property
    def handler(self) -> str:
        """The name of its handler, for people."""
        return self.message_type.handler if self.message_type else "no handler"

    @property
    def coordinates(self) -> str:
        """The record's place in Kafka, for people. Anything stored under a name needs `place`."""
        return f"{self.message.topic}:{self.message.partition}:{self.message.offset}"

    @property
    def id_of_its_own(self) -> str:
        """The id of a row for this very record, where the message's id is another's or has none."""
        return f"{self.message.id}~{self.place}"

    @property
    def place(self) -> str:
        message = self.message
        return place(message.topic, self.reading.topic_id, message.partition, message.offset)
