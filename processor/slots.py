"""A `transactional.id` that is stable across restarts and unique among the living.

Each producer leases the lowest free slot of its consumer by a Postgres session advisory lock. When
a process dies its lock goes with it; the next one takes the slot, and initialising the producer
ends the dead one's open transaction at once, instead of leaving committed readers to wait for its
timeout.
"""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

from processor.errors import SetupError

if TYPE_CHECKING:
    from asyncpg import Connection, Record

MAX_SLOTS = 10_000

LEASE = "SELECT pg_try_advisory_lock($1, $2)"


def _lock_class(consumer: str) -> int:
    """A signed 32-bit key; two consumers with the same one only skip each other's slots."""
    return zlib.crc32(f"processor-slot:{consumer}".encode()) - 2**31


class Slots:
    """Those of one process: one for each of its producers, all leased on the same connection."""

    def __init__(self, consumer: str) -> None:
        self._consumer = consumer
        self._held: dict[object, int] = {}

    async def lease(self, connection: Connection[Record], holder: object) -> str:
        """A transactional id that is ours for as long as this connection lives: the one held before, if possible."""
        before = self._held.pop(holder, None)
        others = set(self._held.values())  # a connection gets its own lock a second time
        for slot in range(MAX_SLOTS) if before is None else (before, *range(MAX_SLOTS)):
            if slot not in others and await connection.fetchval(LEASE, _lock_class(self._consumer), slot):
                self._held[holder] = slot
                return f"{self._consumer}-{slot}"
        raise SetupError(f"all {MAX_SLOTS} transactional id slots of {self._consumer} are taken")
