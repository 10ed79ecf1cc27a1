"""A record on its way through the engine, and the reading of a partition that it came from."""

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
    """One reading of a partition, from where it began: what its records have in common.

    Recovery and the end of a pause begin a new one. Records of an older reading are void, because the new one
    delivers them again.
    """

    partition: Partition
    partition_id: int  # the partition's name in the inbox
    topic_id: str  # tells a topic from another one that has had its name
    epoch: int  # the owner's


@dataclass(slots=True, eq=False)
class Record:
    """What the handler gets, the bytes as they came, and what was decided about them."""

    message: Message[Any]
    key: bytes  # in the inbox
    payload: bytes | None
    payload_hash: int
    size: int
    message_type: MessageType | None  # None: there is no handler for it
    in_inbox: bool  # False for a type that does without
    failure: Failure | None
    reading: Reading
    collided: bool = False
    redriven: bool = False  # an operator sent it again
    foreign: bool = False  # an operator sent it again for another consumer of the topic: not for us
    parked: bool = False  # has to wait behind a failed message of its key
    elsewhere: bool = False  # its row is another partition's, where the message was first seen
    alone: bool = False  # has a history: it gets a transaction of its own, and its start is put on record
    attempts: int = 0  # that failed before, as far as is known
    unfinished: int = 0  # attempts that never came to an end: they took the process with them
    begun: bool = False  # the start of our own attempt is on record
    first_failed_at: datetime | None = None
    failed_as: frozenset[tuple[str | None, ...]] = frozenset()  # the ways in which it failed for good before

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
        """Its name, for people."""
        return self.message_type.handler if self.message_type else "no handler"

    @property
    def coordinates(self) -> str:
        """For people. What is stored under a name needs `place`."""
        return f"{self.message.topic}:{self.message.partition}:{self.message.offset}"

    @property
    def place(self) -> str:
        message = self.message
        return place(message.topic, self.reading.topic_id, message.partition, message.offset)
