"""Messages and outputs as handlers see them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from operator import attrgetter
from typing import Any, Generic, NamedTuple, TypeVar, overload

T = TypeVar("T")


Headers = Sequence[tuple[str, bytes | None]]


class Partition(NamedTuple):
    topic: str
    number: int

    def __str__(self) -> str:
        return f"{self.topic}[{self.number}]"


def place(topic: str, topic_id: str, partition: int, offset: int | str) -> str:
    """Return a name that no other record ever has: a recreated topic has other records at the same offsets."""
    return f"{topic}:{topic_id}:{partition}:{offset}"


def last_header(headers: Headers, name: str) -> bytes | None:
    """Return the last header of that name, by Kafka's own convention."""
    for key, value in reversed(headers):
        if key == name:
            return value
    return None


@dataclass(slots=True, eq=False)
class Message(Generic[T]):
    """One message, decoded as the handler's annotation asks."""

    id: str
    type: str | None
    key: bytes | None
    value: T
    headers: Headers
    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None
    attempt: int = 1

    @property
    def timestamp(self) -> datetime | None:
        """The record's time, or None; producers choose it freely, so it may lie outside of the calendar."""
        if self.timestamp_ms is None:
            return None
        try:
            return datetime.fromtimestamp(self.timestamp_ms / 1000, UTC)
        except (ValueError, OverflowError, OSError):
            return None

    def header(self, name: str) -> bytes | None:
        return last_header(self.headers, name)


class Messages(Sequence[Message[T]]):
    """The messages of a batch: as columns, which is several times as fast, or one by one like any sequence."""

    def __init__(
        self, count: int, column: Callable[[str], Iterable[Any]], make: Callable[[], list[Message[T]]]
    ) -> None:
        self._count = count
        self._column = column
        self._make = make

    @classmethod
    def of(cls, messages: list[Message[T]]) -> Messages[T]:
        columns = {"ids": "id", "keys": "key", "values": "value", "headers": "headers"}
        return cls(len(messages), lambda name: map(attrgetter(columns[name]), messages), lambda: messages)

    # Each column is a copy made on first use, so that handlers may change it.

    @cached_property
    def ids(self) -> list[str]:
        return list(self._column("ids"))

    @cached_property
    def keys(self) -> list[bytes | None]:
        return list(self._column("keys"))

    @cached_property
    def values(self) -> list[T]:
        return list(self._column("values"))

    @cached_property
    def headers(self) -> list[Headers]:
        return list(self._column("headers"))

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Message[T]: ...
    @overload
    def __getitem__(self, index: slice) -> list[Message[T]]: ...
    def __getitem__(self, index: int | slice) -> Message[T] | list[Message[T]]:
        return self._messages[index]

    def __iter__(self) -> Iterator[Message[T]]:
        return iter(self._messages)

    @cached_property
    def _messages(self) -> list[Message[T]]:
        return self._make()


@dataclass(slots=True, eq=False)
class Output:
    """One record to send, visible to committed readers if and only if the handler's rows are.

    `value` may be bytes, text, None (a delete marker) or anything that has a JSON form.
    `cause` is the message that this output answers; only batch handlers have to set it.
    """

    topic: str
    value: Any
    key: bytes | str | None = None
    headers: Mapping[str, bytes | str | None] | None = None
    type: str | None = None
    cause: Message[Any] | None = None


@dataclass(slots=True, eq=False)
class Outputs:
    """One output for each message of a batch, as columns in the order of the messages. See Output."""

    topic: str
    values: Sequence[Any]
    keys: Sequence[bytes | str | None] | None = None
    type: str | None = None


@dataclass(slots=True, eq=False)
class Result:
    """A value to keep in the inbox row, and the outputs, if any."""

    value: Any
    outputs: Sequence[Output] = ()
    cause: Message[Any] | None = None
