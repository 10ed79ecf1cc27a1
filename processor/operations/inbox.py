"""The inbox as an operator looks at it: pages of messages, whatever their status. Read-only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from processor.messages import identity
from processor.operations import names
from processor.postgres import dead_letters, look_up
from processor.postgres.dead_letters import Filter
from processor.postgres.look_up import Place, Wanted

if TYPE_CHECKING:
    from processor.messages.message import Partition
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

SLOW = (
    "completed messages have no index for this filter: give --id, leave completed ones out with --status, or give it "
    "longer with --timeout"
)


@dataclass(slots=True)
class Page:
    messages: list[dict[str, Any]]
    after: str | None  # what the next page begins behind; None if this is the last


async def listed(
    db: Connection,
    settings: Settings,
    wanted: Wanted,
    ids: Sequence[str],
    topic: str | None,
    partition: int | None,
    after: Place,
    limit: int,
) -> Page:
    """One page of the messages that match."""
    consumer = settings.consumer
    partitions = await dead_letters.partitions(db, consumer, Filter(topic=topic, partition=partition))
    by_key = await _keys(db, settings, ids, wanted.type) if ids else {}
    if ids:
        wanted = replace(wanted, keys=list(by_key))
    rows = await look_up.page(db, wanted, partitions, after, limit + 1)
    more = len(rows) > limit
    rows = rows[:limit]
    messages = [_described(row, partitions[row["partition_id"]], by_key.get(row["key"])) for row in rows]
    return Page(messages, written(look_up.place_of(rows[-1], wanted)) if more else None)


def written(place: Place) -> str:
    """A place in a list as text, for the next page."""
    if place.partition_id < 0:
        return str(place.key)
    return f"{place.partition_id}/{place.status}/{place.received_at.isoformat()}/{place.key}"


def read(text: str, wanted: Wanted) -> Place | None:
    """The place that such a text stands for; None if it is none of a list of these messages."""
    try:
        if wanted.completed:
            return Place(UUID(text))
        partition_id, status, received_at, key = text.split("/")
        if status not in look_up.STATUSES:
            return None
        return Place(UUID(key), int(partition_id), status, datetime.fromisoformat(received_at))
    except ValueError:
        return None


async def _keys(db: Connection, settings: Settings, ids: Sequence[str], type_: str | None) -> dict[UUID, str]:
    """For each row that one of the ids may stand for: its key, and the id as the inbox has it."""
    key_of = identity.inbox_key(settings.consumer)
    unfinished = await names.all_named(db, settings, Filter(ids=tuple(ids), statuses=dead_letters.STATUSES))
    found = {*unfinished.ids, *(id_ for given in ids for id_ in names.candidates(settings, given, type_))}
    return {UUID(bytes=key_of(id_)): id_ for id_ in found}


def _described(row: dict[str, Any], partition: Partition, id_: str | None) -> dict[str, Any]:
    error = row["error"] or {}
    return {
        "id": row["message_id"] or id_,
        "inbox_key": str(row["key"]),
        "status": row["status"],
        "type": row["type"],
        "topic": partition.topic,
        "partition": partition.number,
        "offset": row["offset"],
        "key": row["record_key"],
        "attempts": row["attempts"],
        "class": error.get("class"),
        "reason": error.get("reason"),
        "result": row["has_result"],
        "received_at": row["received_at"],
        "first_failed_at": row["first_failed_at"],
        "finished_at": row["finished_at"],
        "redriven_at": row["redriven_at"],
    }
