"""Lets the batches of a consumer run side by side until two of them deadlock; then one at a time for a while.

Handlers lock rows in the order in which messages come. Two workers that do so on the same hot rows deadlock with nearly
every batch, and Postgres takes up to a second to notice each. So every batch holds its consumer's advisory lock in
shared mode, which costs nothing. A batch that was in a deadlock runs again with the exclusive lock, so that no other
batch of the consumer can disturb it, and so do the next ones.
"""

from __future__ import annotations

import asyncio
import hashlib
from typing import TYPE_CHECKING

import structlog

from processor.postgres.session import end_frozen

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from processor.postgres.session import Session
    from processor.settings.schema import Settings

log = structlog.get_logger()

# This many batches run alone after a deadlock: twice as many after each further deadlock, and half as many again after
# an equal number of batches beside others without one.
FIRST_ALONE = 16
MOST_ALONE = 1024

# Longer than any batch: a client-side time-out must not bound the wait for a turn.
UNLIMITED_SECONDS = 1e9

# Whatever the server's default: a claim that has waited must see the row that it lost to.
BEGIN = "BEGIN ISOLATION LEVEL READ COMMITTED"
HAS_TURN = "SELECT 1"

WAITS = "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock')"


class DeadlockGate:
    def __init__(self, settings: Settings, control: Session) -> None:
        digest = hashlib.sha256(f"processor-turn:{settings.consumer}".encode()).digest()
        self._lock = int.from_bytes(digest[:8], "big", signed=True)
        self._control = control
        self._patience = settings.database.command_timeout_ms / 1000
        self._idle_seconds = settings.database.idle_in_transaction_timeout_ms / 1000
        self._alone = 0
        self._calm = 0  # batches beside others since the last deadlock, or since `_after_deadlock` was last halved
        self._after_deadlock = FIRST_ALONE

    def begin_sql(self, *, anew: bool = False) -> str:
        """Return the SQL that begins a transaction and waits for its turn; the transaction's end ends the turn.

        `anew` first rolls back the open transaction.
        """
        shared = "" if self._alone else "_shared"
        begin = f"{BEGIN}; SELECT pg_advisory_xact_lock{shared}({self._lock})"
        return f"ROLLBACK; {begin}" if anew else begin

    def commit_and_begin_sql(self) -> str | None:
        """Return the SQL that commits and begins the next transaction, in one round trip; None while batches run alone.

        It does not wait for the turn, because the commit would wait with it. Its status says whether the turn was free:
        it is HAS_TURN then.
        """
        if self._alone:
            return None
        turn = f"pg_try_advisory_xact_lock_shared({self._lock})"
        return f"COMMIT; {BEGIN}; SELECT FROM generate_series(1, {turn}::integer)"

    async def wait_for_turn(self, connection: Connection[Record], begin_sql: str) -> None:
        """Run that SQL, and wait however long other batches take."""
        begun = asyncio.ensure_future(connection.execute(begin_sql, timeout=UNLIMITED_SECONDS))
        waiting = True
        try:
            while not (await asyncio.wait({begun}, timeout=self._patience))[0]:
                if not waiting:
                    raise TimeoutError("Postgres does not answer")  # the connection is unusable
                waiting = await self._is_waiting(connection.get_server_pid())
            begun.result()
        finally:
            if not begun.done():
                begun.cancel()
                await asyncio.wait({begun})

    async def _is_waiting(self, backend: int) -> bool:
        """Return whether it waits for its turn. If not, its answer may have come while Postgres was asked."""
        async with self._control.use() as connection:
            for frozen in await end_frozen(connection, self._idle_seconds):
                log.warning("frozen_session_ended", backend=frozen)
            waiting: bool = await connection.fetchval(WAITS, backend)
        if waiting:
            log.info("still_waiting_for_turn", seconds=self._patience)
        return waiting

    def committed(self) -> None:
        if self._alone:
            self._alone -= 1
            return
        self._calm += 1
        if self._calm >= self._after_deadlock:
            self._calm = 0
            self._after_deadlock = max(self._after_deadlock // 2, FIRST_ALONE)

    def deadlocked(self) -> None:
        self._calm = 0
        self._alone = self._after_deadlock
        self._after_deadlock = min(2 * self._after_deadlock, MOST_ALONE)
