"""Prepared statements of one connection."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import TYPE_CHECKING, TypeAlias

from processor import failpoints

if TYPE_CHECKING:
    import asyncpg
    from asyncpg.prepared_stmt import PreparedStatement

    from processor.postgres.arrays import Arrays
    from processor.postgres.roundtrips import RoundTrips
    from processor.postgres.session import Connection

    Row: TypeAlias = asyncpg.Record
    Statement: TypeAlias = PreparedStatement[Row]

STATEMENTS_KEPT = 256
# An answer that may come within this time is waited for without going to sleep.
SOON_SECONDS = 0.001


class BusyWait:
    """Stay awake for answers that come soon: waking up takes longer than Postgres needs for a small statement.

    Handlers that wait for Postgres message by message gain half as much again from this. After an answer that took
    longer, the next one is waited for asleep.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = 0.0
        self._waiting = False
        self._awake = False
        self._soon = True  # as far as the last answer shows

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._waiting = True
        if self._soon and not self._awake:
            self._awake = True
            self._loop.call_soon(self._look)

    def end(self) -> None:
        self._waiting = False
        self._soon = time.perf_counter() - self._began < SOON_SECONDS

    def _look(self) -> None:
        if self._waiting and time.perf_counter() - self._began < SOON_SECONDS:
            self._loop.call_soon(self._look)  # as long as something is to be done, the loop does not sleep
        else:
            self._awake = False


class Statements:
    """Prepared statements of one connection, the least used forgotten first."""

    def __init__(self, connection: Connection, arrays: Arrays, round_trips: RoundTrips) -> None:
        self.connection = connection
        self.arrays = arrays
        self.round_trips = round_trips
        self.busy_wait = BusyWait()
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
