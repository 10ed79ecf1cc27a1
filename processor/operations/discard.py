"""Gives messages up for good. Their rows stay, with who, when and why; the service skips them from then on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from processor.operations import names
from processor.postgres import dead_letters

if TYPE_CHECKING:
    from processor.postgres.dead_letters import Filter, ParkedKey
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

# Rows that are locked at a time: the service waits for them.
CHUNK_ROWS = 500


async def discard(db: Connection, settings: Settings, wanted: Filter, by: str, reason: str) -> tuple[int, int]:
    """How many were given up, and how many of their parked keys still have messages that wait."""
    consumer = settings.consumer
    wanted = await names.each_named(db, settings, wanted)
    discarded = 0
    keys: set[ParkedKey] = set()
    for partition_id in await dead_letters.partitions(db, consumer, wanted):
        async for page in dead_letters.to_discard(db, consumer, wanted, partition_id):
            for start in range(0, len(page), CHUNK_ROWS):
                rows = page[start : start + CHUNK_ROWS]
                discarded += await dead_letters.discard(db, [row.key for row in rows], by, reason)
                keys |= {(partition_id, row.parked_key) for row in rows if row.parked_key is not None}
    return discarded, len(await dead_letters.heads(db, keys))
