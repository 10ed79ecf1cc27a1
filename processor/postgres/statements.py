"""Prepared statements of one connection."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

from processor import failpoints

if TYPE_CHECKING:
    import asyncpg
    from asyncpg.prepared_stmt import PreparedStatement

    from processor.postgres.arrays import Arrays
    from processor.postgres.session import Connection

    Row: TypeAlias = asyncpg.Record
    Statement: TypeAlias = PreparedStatement[Row]

STATEMENTS_KEPT = 256


class Statements:
    """Prepared statements of one connection, the least used forgotten first."""

    def __init__(self, connection: Connection, arrays: Arrays) -> None:
        self.connection = connection
        self.arrays = arrays
        self._prepared: OrderedDict[str, Statement] = OrderedDict()

    async def prepare(self, sql: str) -> Statement:
        statement = self._prepared.get(sql)
        if statement is None:
            statement = self._prepared[sql] = await self.connection.prepare(sql)
            failpoints.reach("after_prepare")
            if len(self._prepared) > STATEMENTS_KEPT:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end(sql)
        return statement

    def forget(self) -> None:
        """After an error: a plan made for a table that has changed since is not worth keeping."""
        self._prepared.clear()
