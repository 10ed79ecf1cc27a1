"""Slots: a `transactional.id` that is stable across restarts and unique among living processes.

Each process leases the lowest free slot of its consumer by a Postgres session advisory lock. When it dies, it loses the
lock. The next process takes the slot, and initialising its producer ends the dead one's open transaction at once, so
that committed readers need not wait for its time-out. If no process comes, the living ones end it (orphans.py).
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from processor.errors import SetupError

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from processor.postgres.ledger import Ledger
    from processor.postgres.session import Session

MAX_SLOTS = 10_000

LEASE = "SELECT pg_try_advisory_lock($1, $2)"
WAIT = "SELECT pg_advisory_lock($1, $2)"
RETURN = "SELECT pg_advisory_unlock($1, $2)"

LEASED = """
    SELECT objid::integer AS slot, pid FROM pg_locks
    WHERE locktype = 'advisory' AND granted AND classid = $1::integer::oid AND objsubid = 2
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""


class Slot:
    """Our slot, leased as long as this session's connection lives; a new connection leases it again.

    Nothing else uses that connection: if another statement were cancelled on it, we would look dead while our producer
    lives.
    """

    def __init__(self, consumer: str, session: Session, ledger: Ledger, most: int = MAX_SLOTS) -> None:
        self._consumer = consumer
        self._most = most
        self._session = session
        self._ledger = ledger
        self._leases = lease_class(consumer)
        self._endings = _lock_class(f"processor-slot-ending:{consumer}")
        self._held: int | None = None
        self._leased_on: Connection[Record] | None = None
        self.backend: int | None = None  # the server process that holds our lock; None if nothing was leased yet
        self.leases = 0  # counts new connections: with each the slot may have looked free for a moment

    @property
    def number(self) -> int:
        assert self._held is not None, "nothing was leased yet"
        return self._held

    async def lease(self) -> str:
        """Lease a name that no other living process has, the one held before if it is free."""
        async with self._session.use() as connection:
            if connection is not self._leased_on:
                self._held = await self._lowest_free(connection)
                self._leased_on = connection
                self.backend = connection.get_server_pid()
                self.leases += 1
            return self.name(self.number)

    async def _lowest_free(self, connection: Connection[Record]) -> int:
        if self._held is not None and await self._take(connection, self._held):
            return self._held
        # A slot that the ledger names may belong to a process that lost its connection as we did and is about to lease
        # it again: taking it would fence that process, which would then fence the next.
        spared = set() if self._held is None else await self._ledger.slots(connection)
        for slot in range(self._most):
            if (slot not in spared or self._most == 1) and await self._take(connection, slot):
                return slot
        if self._most == 1:
            raise SetupError(f"{self._consumer} is being run by another process")
        raise SetupError(f"all {self._most} transactional id slots of {self._consumer} are taken")

    async def leased(self, connection: Connection[Record]) -> set[int]:
        """Return the slots of all living processes."""
        return {row["slot"] for row in await connection.fetch(LEASED, self._leases)}

    @asynccontextmanager
    async def ending(self, slot: int) -> AsyncIterator[bool]:
        """Yield whether the slot is free. A process that leases it meanwhile waits until this ends."""
        async with self._session.use() as connection:
            ours = await connection.fetchval(LEASE, self._endings, slot)
        try:
            async with self._session.use() as connection:
                leased = await self.leased(connection)
            # If our own is missing, we have just lost the connection, and so may others.
            yield ours and self._held in leased and slot not in leased
        finally:
            if ours:
                async with self._session.use() as connection:
                    await connection.execute(RETURN, self._endings, slot)

    async def _take(self, connection: Connection[Record], slot: int) -> bool:
        if not await connection.fetchval(LEASE, self._leases, slot):
            return False
        # Wait for a process that is ending the slot's transaction: it would fence the producer that we initialise.
        await connection.execute(WAIT, self._endings, slot)
        await connection.execute(RETURN, self._endings, slot)
        return True

    def name(self, slot: int) -> str:
        return f"{self._consumer}-{slot}"


def lease_class(consumer: str) -> int:
    """The class of the advisory locks by which processes of this consumer hold their slots."""
    return _lock_class(f"processor-slot:{consumer}")


def _lock_class(name: str) -> int:
    """Return a signed 32-bit key; two consumers with the same key only skip each other's slots."""
    return zlib.crc32(name.encode()) - 2**31
