"""Failed and parked messages in the inbox: listed, counted and shown."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from processor.errors import SetupError
from processor.postgres import dead_letters

if TYPE_CHECKING:
    from processor.messages.message import Partition
    from processor.postgres.dead_letters import Filter
    from processor.postgres.session import Connection


@dataclass(slots=True)
class Listing:
    messages: list[dict[str, Any]]
    total: int


async def listed(db: Connection, consumer: str, wanted: Filter, limit: int) -> Listing:
    """The first messages that match, by partition and offset, and how many match in all."""
    partitions = await dead_letters.partitions(db, consumer, wanted)
    rows = await dead_letters.first(db, consumer, wanted, partitions, limit)
    total = len(rows) if len(rows) < limit else await dead_letters.count(db, consumer, wanted, partitions)
    return Listing([_described(row, partitions[row["partition_id"]]) for row in rows], total)


async def shown(db: Connection, consumer: str, message_id: str) -> dict[str, Any]:
    """Everything that the inbox has about one message, whatever its status."""
    row = await dead_letters.find(db, consumer, message_id)
    if row is None:
        raise SetupError(f"{consumer} has no message {message_id!r} in its inbox; `processor dlq list` shows the ids")
    return row


async def count(db: Connection, consumer: str, wanted: Filter) -> int:
    partitions = await dead_letters.partitions(db, consumer, wanted)
    return await dead_letters.count(db, consumer, wanted, partitions)


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
