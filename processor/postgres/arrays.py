"""Arrays as arguments of statements, nine times as fast as asyncpg encodes a list by itself.

asyncpg walks over an array twice. The first walk finds its dimensions and checks every element with collections.abc for
being an array too, which takes most of the time. The second walk encodes it. If no element is an array, the first walk
may be skipped.
"""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Iterator, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import asyncpg

if TYPE_CHECKING:
    from asyncpg import Connection, Record
    from asyncpg.prepared_stmt import PreparedStatement

# With fewer elements, checking them costs more than it saves.
WORTH_IT = 16

# Types whose values are never arrays.
SCALARS = frozenset(
    {
        bool,
        bytes,
        datetime.date,
        datetime.datetime,
        datetime.time,
        datetime.timedelta,
        Decimal,
        float,
        int,
        str,
        type(None),
        uuid.UUID,
    }
)


class Flat(list[Any]):
    """A list that looks empty on the first of two walks."""

    __slots__ = ("_walked",)

    def __init__(self, elements: list[Any]) -> None:
        super().__init__(elements)
        self._walked = False

    def __iter__(self) -> Iterator[Any]:
        self._walked = not self._walked
        return iter(()) if self._walked else super().__iter__()

    def __reduce__(self) -> tuple[type[list[Any]], tuple[list[Any]]]:
        """Copy it as a plain list: copying must not count as a walk."""
        return list, (self[:],)


class Arrays:
    """Prepares arrays for the installed version of asyncpg."""

    def __init__(self, *, walked_twice: bool) -> None:
        self._walked_twice = walked_twice

    @classmethod
    async def suited(cls, connection: Connection[Record]) -> Arrays:
        """Test whether an array survives the trick; if this asyncpg encodes in another way, lists stay as they are."""
        sent = [1, 2, None]
        try:
            received = await connection.fetchval("SELECT $1::integer[]", Flat(sent))
        except (asyncpg.PostgresError, asyncpg.InterfaceError):  # such as 08P01: fewer elements than announced
            received = None
        return cls(walked_twice=received == sent)

    def arguments(self, statement: PreparedStatement[Record], values: Sequence[Any]) -> Sequence[Any]:
        """Return the arguments of a statement, with arrays in the cheapest form."""
        if not self._walked_twice or not any(type(value) is list and len(value) >= WORTH_IT for value in values):
            return values
        parameters = statement.get_parameters()
        if len(parameters) != len(values):
            return values  # asyncpg raises the right error
        return [
            Flat(value)
            if parameter.kind == "array" and type(value) is list and SCALARS.issuperset(map(type, value))
            else value
            for parameter, value in zip(parameters, values, strict=True)
        ]
