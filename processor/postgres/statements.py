"""What is known of the statements of one connection: how they are prepared, and what they touch."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

from processor import failpoints
from processor.postgres import footprints, gathered

if TYPE_CHECKING:
    import asyncpg
    from asyncpg.prepared_stmt import PreparedStatement

    from processor.postgres.arrays import Arrays
    from processor.postgres.footprints import Footprint
    from processor.postgres.gathered import Gathered
    from processor.postgres.roundtrips import RoundTrips
    from processor.postgres.session import Connection

    Row: TypeAlias = asyncpg.Record
    Statement: TypeAlias = PreparedStatement[Row]

STATEMENTS_KEPT = 256
# More are not looked up: a handler may make a new text for every message.
FOOTPRINTS_KEPT = 64
# Triggers and foreign keys may be added while we run. Without an error of ours, we notice that after this time.
FOOTPRINTS_FRESH_SECONDS = 60.0
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
    """Prepared statements of one connection, the least used forgotten first; and the footprints of those queued."""

    def __init__(self, connection: Connection, arrays: Arrays, round_trips: RoundTrips) -> None:
        self.connection = connection
        self.arrays = arrays
        self.round_trips = round_trips
        self.busy_wait = BusyWait()
        self._prepared: OrderedDict[str, Statement] = OrderedDict()
        self._gathered: OrderedDict[tuple[str, bool], Gathered | None] = OrderedDict()
        self._footprints: dict[str, Footprint | None] = {}
        self._footprints_used: set[str] = set()
        self._footprints_wanted: set[str] = set()
        self._footprints_fresh_until = 0.0

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

    async def prepare_gathered(self, sql: str, *, first_only: bool) -> Gathered | None:
        """Prepare a read for many calls at once; return None if it cannot be sent so."""
        name = (sql, first_only)
        if name not in self._gathered:
            statement = await self.prepare(sql)
            self._gathered[name] = await gathered.prepare(self.connection, statement, first_only=first_only)
            if len(self._gathered) > STATEMENTS_KEPT:
                self._gathered.popitem(last=False)
        return self._gathered[name]

    def footprint(self, sql: str) -> Footprint | None:
        """Return what a statement touches; None if that may be anything, or is not known."""
        if sql in self._footprints:
            self._footprints_used.add(sql)
        return self._footprints.get(sql)

    def want_footprints(self, statements: Iterable[str]) -> None:
        """Have these looked up between this transaction and the next."""
        self._footprints_wanted.update(sql for sql in statements if sql not in self._footprints)

    @property
    def have_footprints_to_look_up(self) -> bool:
        return bool(self._footprints_wanted) or self._footprints_are_stale

    @property
    def _footprints_are_stale(self) -> bool:
        return bool(self._footprints) and time.monotonic() > self._footprints_fresh_until

    async def look_up_footprints(self) -> None:
        """Look up what is wanted, and sometimes again what is known. No transaction may be open."""
        if self._footprints_are_stale:
            self._footprints_wanted |= self._footprints.keys() & self._footprints_used
            self._footprints.clear()
            self._footprints_used.clear()
        wanted, self._footprints_wanted = self._footprints_wanted, set()
        if not wanted or len(wanted) + len(self._footprints) > FOOTPRINTS_KEPT:
            return
        if not self._footprints:
            self._footprints_fresh_until = time.monotonic() + FOOTPRINTS_FRESH_SECONDS
        self.round_trips.purpose = "other"
        for sql in wanted:
            self._footprints[sql] = await footprints.look_up(self.connection, sql)

    def doubt_footprints(self) -> None:
        """Have what is known looked up again before the next transaction."""
        self._footprints_fresh_until = 0.0

    def forget(self) -> None:
        """After an error: a plan made for a table that has changed since is not worth keeping."""
        self._prepared.clear()
        self._gathered.clear()
        self.doubt_footprints()
