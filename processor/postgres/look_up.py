"""Pages of the inbox, completed messages included, for somebody who only looks.

The inbox has no index for looking at completed rows: one would slow down every claim. So a list with completed rows
comes in the order of the primary key, which the first page needs no sorting for, and one without them by partition,
status and time, as the index of unfinished rows has them. What a filter leaves is found by reading on; the caller
bounds how long.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import UUID

from processor.messages import wire

if TYPE_CHECKING:
    from processor.postgres.session import Connection

STATUSES = ("pending", "processing", "completed", "failed", "parked", "discarded")

_COLUMNS = """
    key, partition_id, "offset", status::text, message_id, type, record_key, error::text, attempts,
    received_at, first_failed_at, finished_at, redriven_at, result IS NOT NULL AS has_result
"""
_MATCHES = """
    status = ANY ($2::text[]::inbox_status[])
    AND ($3::uuid[] IS NULL OR key = ANY ($3))
    AND ($4::bytea IS NULL OR record_key = $4)
    AND ($5::text IS NULL OR type = $5)
    AND ($6::timestamptz IS NULL OR received_at >= $6)
    AND ($7::timestamptz IS NULL OR received_at < $7)
"""

ALL = f"""
    SELECT {_COLUMNS} FROM inbox
    WHERE partition_id = ANY ($1::integer[]) AND {_MATCHES} AND key > $8 ORDER BY key LIMIT $9
"""  # noqa: S608 - our constants

# One partition at a time, and the condition that names the index: so rows come in its order, and nothing is sorted.
UNFINISHED = f"""
    SELECT {_COLUMNS} FROM inbox
    WHERE partition_id = $1 AND status <> 'completed' AND {_MATCHES}
          AND (status, received_at, key) > ($8::text::inbox_status, $9::timestamptz, $10::uuid)
    ORDER BY inbox.status, received_at, key LIMIT $11
"""  # noqa: S608 - our constants

# The condition that names the index again; it leads to the partition.
AT = """
    SELECT message_id FROM inbox
    WHERE partition_id = ANY ($1::integer[]) AND status <> 'completed' AND "offset" = $2 AND message_id IS NOT NULL
"""

_FIRST_KEY = UUID(int=0)
_FIRST_TIME = datetime(1, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which messages; a field that is not given matches all."""

    statuses: tuple[str, ...] = STATUSES
    keys: Sequence[UUID] | None = None  # of the inbox
    record_key: bytes | None = None
    type: str | None = None
    since: datetime | None = None  # first seen at this time or later
    until: datetime | None = None

    @property
    def completed(self) -> bool:
        return "completed" in self.statuses

    def arguments(self) -> list[Any]:
        """$2 to $7 of the statements."""
        return [list(self.statuses), self.keys, self.record_key, self.type, self.since, self.until]


@dataclass(frozen=True, slots=True)
class Place:
    """The last row of a page; the next page begins behind it."""

    key: UUID = _FIRST_KEY
    partition_id: int = -1  # this and the rest only in a list without completed rows
    status: str = "pending"
    received_at: datetime = _FIRST_TIME


async def page(
    connection: Connection, wanted: Wanted, partition_ids: Iterable[int], after: Place, limit: int
) -> list[dict[str, Any]]:
    """Return at most `limit` rows behind a place, their errors decoded."""
    rows: list[Any] = []
    if wanted.completed:
        rows = await connection.fetch(ALL, list(partition_ids), *wanted.arguments(), after.key, limit)
    else:
        for partition_id in sorted(partition_ids):
            if partition_id < after.partition_id or len(rows) == limit:
                continue
            at = after if partition_id == after.partition_id else Place()
            behind = (at.status, at.received_at, at.key)
            rows += await connection.fetch(UNFINISHED, partition_id, *wanted.arguments(), *behind, limit - len(rows))
    return [dict(row) | {"error": wire.load_error(row["error"])} for row in rows]


async def at(connection: Connection, partition_ids: Iterable[int], offset: int) -> list[str]:
    """Return the ids of messages from this offset that did not complete."""
    return [row["message_id"] for row in await connection.fetch(AT, list(partition_ids), offset)]


def place_of(row: dict[str, Any], wanted: Wanted) -> Place:
    if wanted.completed:
        return Place(row["key"])
    return Place(row["key"], row["partition_id"], row["status"], row["received_at"])
