"""One statement for many calls: each row says which call it answers.

asyncpg sends a prepared statement for many sets of arguments in one round trip (`fetchmany`), but returns all rows in
one list. So the statement becomes a subquery of another one, which has one parameter more, the number of the call, and
adds it to each row as last column. Handlers see the rows without it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import asyncpg

if TYPE_CHECKING:
    from asyncpg.prepared_stmt import PreparedStatement

    from processor.postgres.session import Connection

_NUMBER_OF_CALL = "number of the call"


class GatheredRow(asyncpg.Record):
    """A row that hides its last column, the number of its call."""

    __slots__ = ()

    @property
    def _all(self) -> tuple[Any, ...]:
        return tuple(super().values())

    def __len__(self) -> int:
        return super().__len__() - 1

    def __iter__(self) -> Iterator[Any]:
        return iter(self._all[:-1])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            if index == _NUMBER_OF_CALL:
                raise KeyError(index)
            return super().__getitem__(index)
        return self._all[:-1][index]

    def __contains__(self, name: object) -> bool:
        return name != _NUMBER_OF_CALL and super().__contains__(name)

    def __eq__(self, other: object) -> bool:
        return tuple(self) == (tuple(other) if isinstance(other, asyncpg.Record) else other)

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        return f"<Record {' '.join(f'{name}={value!r}' for name, value in self.items())}>".replace(" >", ">")

    def get(self, key: str, default: Any = None) -> Any:
        return default if key == _NUMBER_OF_CALL else super().get(key, default)

    def keys(self) -> Iterator[str]:
        return iter([*super().keys()][:-1])

    def values(self) -> Iterator[Any]:
        return iter(self)

    def items(self) -> Iterator[tuple[str, Any]]:
        return iter([*super().items()][:-1])


class Gathered:
    """A read that is prepared to be sent for many calls at once."""

    def __init__(self, statement: PreparedStatement[GatheredRow]) -> None:
        self._statement = statement

    async def fetch(self, calls: Sequence[Sequence[Any]]) -> list[list[GatheredRow]]:
        """Return the rows of each call, in one round trip."""
        found: list[list[GatheredRow]] = [[] for _ in calls]
        for row in await self._statement.fetchmany([(*arguments, number) for number, arguments in enumerate(calls)]):
            found[row._all[-1]].append(row)  # noqa: SLF001 - hidden from handlers only
        return found


async def prepare(
    connection: Connection, statement: PreparedStatement[asyncpg.Record], *, first_only: bool
) -> Gathered | None:
    """Prepare a read for many calls; return None if it is no query, or not the same query as part of another one.

    The savepoint keeps the open transaction usable if Postgres does not accept it.
    """
    number = len(statement.get_parameters()) + 1
    sql = f"""
        SELECT gathered.*, ${number}::integer AS "{_NUMBER_OF_CALL}" FROM (
            {statement.get_query().rstrip().rstrip(";")}
        ) AS gathered {"LIMIT 1" if first_only else ""}
    """  # noqa: S608 - a statement that Postgres has accepted as a whole
    await connection.execute("SAVEPOINT gathering")
    try:
        gathered = await connection.prepare(sql, record_class=GatheredRow)
    except asyncpg.PostgresError:
        await connection.execute("ROLLBACK TO SAVEPOINT gathering; RELEASE SAVEPOINT gathering")
        return None
    await connection.execute("RELEASE SAVEPOINT gathering")
    is_the_same = (
        gathered.get_parameters()[:-1] == statement.get_parameters()
        and gathered.get_attributes()[:-1] == statement.get_attributes()
    )
    return Gathered(gathered) if is_the_same else None
