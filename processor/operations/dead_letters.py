"""Failed and parked messages in the inbox: listed and counted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from processor.operations import names
from processor.postgres import dead_letters

if TYPE_CHECKING:
    from processor.messages.message import Partition
    from processor.postgres.dead_letters import Filter
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings


@dataclass(slots=True)
class Listing:
    messages: list[dict[str, Any]]
    total: int


async def listed(db: Connection, settings: Settings, wanted: Filter, limit: int) -> Listing:
    """The first messages that match, by partition and offset, and how many match in all."""
    consumer = settings.consumer
    wanted = await names.all_named(db, settings, wanted)
    partitions = await dead_letters.partitions(db, consumer, wanted)
    rows = await dead_letters.first(db, consumer, wanted, partitions, limit)
    total = len(rows) if len(rows) < limit else await dead_letters.count(db, consumer, wanted, partitions)
    return Listing([_described(row, partitions[row["partition_id"]]) for row in rows], total)


async def count(db: Connection, settings: Settings, wanted: Filter) -> int:
    """How many messages there are to be changed."""
    wanted = await names.each_named(db, settings, wanted)
    partitions = await dead_letters.partitions(db, settings.consumer, wanted)
    return await dead_letters.count(db, settings.consumer, wanted, partitions)


def _described(row: dict[str, Any], partition: Partition) -> dict[str, Any]:
    error = row["error"] or {}
    return {
        "id": row["message_id"],
        "status": row["status"],
        "type": row["type"],
        "topic": partition.topic,
        "partition": partition.number,
        "offset": row["offset"],
        "key": row["record_key"],
        "bytes": row["bytes"],
        "class": error.get("class"),
        "reason": error.get("reason"),
        "message": error.get("message"),
        "attempts": row["attempts"],
        "parked": row["parked_key"] is not None,
        "received_at": row["received_at"],
        "first_failed_at": row["first_failed_at"],
        "last_failed_at": row["finished_at"],
        "redriven_at": row["redriven_at"],
    }
