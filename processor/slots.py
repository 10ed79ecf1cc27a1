"""A `transactional.id` that is stable across restarts and unique among the living.

Each process leases the lowest free slot of its consumer by a Postgres session advisory lock. When it dies the lock goes
with it. Whoever takes the slot next, or one of its partitions, initialises a producer of that name, which ends the dead
one's open transaction at once, instead of leaving committed readers to wait for its time-out.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from processor.errors import SetupError

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from processor.postgres import Session

MAX_SLOTS = 10_000

LEASE = "SELECT pg_try_advisory_lock($1, $2)"
RETURN = "SELECT pg_advisory_unlock($1, $2)"


class Slot:
    """Ours for as long as this session's connection lives; another connection leases it anew."""

    def __init__(self, consumer: str, session: Session) -> None:
        self._consumer = consumer
        # A signed 32-bit key; two consumers with the same one only skip each other's slots.
        self._lock_class = zlib.crc32(f"processor-slot:{consumer}".encode()) - 2**31
        self._session = session
        self._held: int | None = None

    @property
    def number(self) -> int:
        assert self._held is not None, "nothing was leased yet"
        return self._held

    async def lease(self) -> str:
        """The name that nobody else who lives has: the one held before if it is to be had."""
        async with self._session.use() as connection:
            for slot in range(MAX_SLOTS) if self._held is None else (self._held, *range(MAX_SLOTS)):
                if await self._take(connection, slot):
                    self._held = slot
                    return self._name(slot)
        raise SetupError(f"all {MAX_SLOTS} transactional id slots of {self._consumer} are taken")

    @asynccontextmanager
    async def abandoned(self, slots: Iterable[int]) -> AsyncIterator[list[str]]:
        """The names of those slots whose process is gone; nobody else gets them meanwhile."""
        others = sorted(set(slots) - {self._held})
        async with self._session.use() as connection:
            taken = [slot for slot in others if await self._take(connection, slot)]
        try:
            yield [self._name(slot) for slot in taken]
        finally:
            if taken:
                async with self._session.use() as connection:
                    for slot in taken:
                        await connection.execute(RETURN, self._lock_class, slot)

    async def _take(self, connection: Connection[Record], slot: int) -> bool:
        taken: bool = await connection.fetchval(LEASE, self._lock_class, slot)
        return taken

    def _name(self, slot: int) -> str:
        return f"{self._consumer}-{slot}"
