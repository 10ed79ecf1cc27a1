"""Replays: what was asked for, which ranges they go over, and how far they have come.

The SQL of the tables replays and replay_ranges is here. A replay's position is in its own rows of the ledger, which the
engine moves as it moves any other; what it counts is added in the same transaction.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processor.postgres.session import Connection

LOWEST_NEEDED = """
    SELECT r.live_partition_id, min(l.next_offset) AS lowest
    FROM replays p
    JOIN replay_ranges r ON r.consumer = p.consumer AND r.name = p.name
    JOIN ledger l ON l.partition_id = r.partition_id AND l.next_offset < r.end_offset
    WHERE p.consumer = $1 AND p.state IN ('active', 'paused')
    GROUP BY r.live_partition_id
"""


async def lowest_needed(connection: Connection, consumer: str) -> Mapping[int, int]:
    """Return by ledger.partition_id of the live consumer the lowest offset that an unfinished replay still needs."""
    return {row["live_partition_id"]: row["lowest"] for row in await connection.fetch(LOWEST_NEEDED, consumer)}
