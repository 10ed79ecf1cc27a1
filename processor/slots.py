"""A `transactional.id` that is stable across restarts and unique among the living.

Each producer leases the lowest free slot of its consumer by a Postgres session advisory lock. When
its process dies the lock goes with it; the next one takes the slot, and initialising the producer
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


async def lease(connection: Connection[Record], consumer: str, held: int | None) -> int:
    """A slot that is ours for as long as this connection lives: the one held before if it is to be had."""
    for slot in range(MAX_SLOTS) if held is None else (held, *range(MAX_SLOTS)):
        if await connection.fetchval(LEASE, _lock_class(consumer), slot):
            return slot
    raise SetupError(f"all {MAX_SLOTS} transactional id slots of {consumer} are taken")


def transactional_id(consumer: str, slot: int) -> str:
    return f"{consumer}-{slot}"
