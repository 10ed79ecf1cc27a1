"""What is known about a type of messages before any of them is handled."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from processor.messages.incoming import Incoming, RawColumns

ANY_TYPE = "*"


@dataclass(frozen=True, slots=True, eq=False)
class MessageType:
    name: str  # as in the configuration: `*` takes every type that is not named there
    handler: str  # the handler's name, for people
    read: Callable[[Incoming], Any]  # returns the value as the handler wants it; raises BadValue
    read_all: Callable[[RawColumns], Sequence[Any] | None]  # the same for many; None if one of them needs `read`
    in_inbox: bool = True
    acts: bool = False  # its handler acts outside the database


class MessageTypes:
    def __init__(self, types: Mapping[str, MessageType]) -> None:
        self._types = types
        self._any = types.get(ANY_TYPE)

    def find(self, name: str | None) -> MessageType | None:
        return self._types.get(name or "", self._any)
