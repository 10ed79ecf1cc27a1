"""Rounds through the inbox that delete what may be forgotten: who may delete, how far a round is, and one step of it.

The SQL of the tables pruning and archived is here. A step looks at a range of the inbox' pages and at nothing else: no
index has to know when a message was completed, so a claim pays nothing for retention. It locks only the rows that it
deletes, and our own row in `pruning`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from processor.postgres.session import Connection

# How long a step waits for a row that somebody else has locked: others may wait for the step's rows meanwhile.
LOCK_TIMEOUT = "20ms"
# A position that no offset reaches: of topics that are gone.
ANY_OFFSET = 2**63 - 1

ELECT = "SELECT pg_try_advisory_lock($1)"
RESIGN = "SELECT pg_advisory_unlock($1)"

PAGES = "SELECT pg_relation_size('inbox') / current_setting('block_size')::bigint"

STANDING = """
    SELECT page, finished_at IS NULL AS under_way,
           extract(epoch FROM clock_timestamp() - began_at)::float8 AS seconds
    FROM pruning WHERE consumer = $1
"""

LATEST = f"""
    SELECT began_at, finished_at, deleted, page, ({PAGES}) AS pages FROM pruning WHERE consumer = $1
"""  # noqa: S608 - a constant of ours

# Waits for a step of the one before, and shuts out its later ones.
TAKE = """
    INSERT INTO pruning (consumer, owner, began_at) VALUES ($1, $2, clock_timestamp())
    ON CONFLICT (consumer) DO UPDATE SET owner = excluded.owner
"""

BEGIN = """
    UPDATE pruning SET began_at = clock_timestamp(), page = 0, finished_at = NULL WHERE consumer = $1 AND owner = $2
"""

GO_ON = "UPDATE pruning SET page = $3 WHERE consumer = $1 AND owner = $2 RETURNING 1"

FINISH = "UPDATE pruning SET deleted = $3, finished_at = clock_timestamp() WHERE consumer = $1 AND owner = $2"

# What a step loses by a crash of the server it does again. With an archive it waits for the disk: the file did too.
UNHURRIED = """
    SELECT set_config('lock_timeout', $1, true),
           set_config('synchronous_commit', CASE WHEN $2 THEN 'on' ELSE 'off' END, true)
"""

PARTITIONS = """
    SELECT topic, partition, topic_id, partition_id, former, next_offset, owner FROM ledger
    WHERE consumer = $1 ORDER BY topic, partition
"""

_EXPIRED = """
    unnest($3::integer[], $4::bigint[]) AS p(partition_id, position)
    WHERE inbox.ctid >= $1::tid AND inbox.ctid < $2::tid AND inbox.status = 'completed'
      AND inbox.partition_id = p.partition_id AND inbox."offset" < p.position
      AND greatest(inbox.received_at, inbox.finished_at, inbox.seen_again_at) < $5
"""

DELETE = f"DELETE FROM inbox USING {_EXPIRED}"  # noqa: S608 - a constant of ours

TAKE_OUT = f"""
    WITH gone AS (DELETE FROM inbox USING {_EXPIRED} RETURNING inbox.*)
    SELECT gone.partition_id, row_to_json(gone)::text AS message FROM gone
"""  # noqa: S608 - a constant of ours

COUNT = f"SELECT count(*) FROM inbox, {_EXPIRED}"  # noqa: S608 - a constant of ours

ARCHIVED = "SELECT file, bytes FROM archived WHERE file = ANY ($1::text[])"

NOTE_ARCHIVED = """
    INSERT INTO archived (file, consumer, bytes, messages) VALUES ($1, $2, $3, $4)
    ON CONFLICT (file) DO UPDATE SET bytes = excluded.bytes, messages = excluded.messages
"""


class Known(NamedTuple):
    """A partition in the ledger."""

    topic: str
    partition: int
    topic_id: str
    partition_id: int
    former: list[int]
    next_offset: int
    owner: str  # the process that works on it, or was the last to do so


@dataclass(frozen=True, slots=True)
class Standing:
    """How far the rounds of a consumer are."""

    page: int
    under_way: bool
    seconds: float  # since the present round, or the last one, began


@dataclass(frozen=True, slots=True)
class Latest:
    """The present round of a consumer, or its last one, for somebody who only looks."""

    began_at: datetime
    finished_at: datetime | None  # None while it is under way
    deleted: int | None  # rows, in the last round that ended
    page: int  # where it goes on
    pages: int  # of the inbox


@dataclass(frozen=True, slots=True)
class Expired:
    """Which rows may go: those at these positions that were last seen before the time."""

    positions: Mapping[int, int]  # by ledger.partition_id; rows at or above stay
    before: datetime

    def arguments(self, first: int, end: int) -> tuple[object, ...]:
        """For the statements about a range of pages."""
        return (first, 0), (end, 0), list(self.positions), list(self.positions.values()), self.before


async def elect(connection: Connection, consumer: str) -> bool:
    """Whether nobody else prunes for this consumer, as long as this connection lives or until `resign`."""
    elected: bool = await connection.fetchval(ELECT, lock_key(consumer))
    return elected


async def resign(connection: Connection, consumer: str) -> None:
    await connection.execute(RESIGN, lock_key(consumer))


async def standing(connection: Connection, consumer: str) -> Standing | None:
    row = await connection.fetchrow(STANDING, consumer)
    return Standing(**row) if row is not None else None


async def latest(connection: Connection, consumer: str) -> Latest | None:
    """None if there never was a round."""
    row = await connection.fetchrow(LATEST, consumer)
    return Latest(**row) if row is not None else None


async def partitions(connection: Connection, consumer: str) -> list[Known]:
    return [Known._make(row) for row in await connection.fetch(PARTITIONS, consumer)]


async def pages(connection: Connection) -> int:
    found: int = await connection.fetchval(PAGES)
    return found


async def archived(connection: Connection, files: Sequence[str]) -> dict[str, int]:
    """Return how many bytes of these archive files count; one of which nothing does is absent."""
    return {row["file"]: row["bytes"] for row in await connection.fetch(ARCHIVED, files)}


async def count(connection: Connection, expired: Expired, first: int, end: int) -> int:
    """How many rows of these pages a step would delete."""
    found: int = await connection.fetchval(COUNT, *expired.arguments(first, end))
    return found


class Round:
    """One process's turn at pruning. All its steps are void once another process has begun its own."""

    def __init__(self, connection: Connection, consumer: str, owner: str) -> None:
        self._connection = connection
        self._consumer = consumer
        self._owner = owner

    async def take(self) -> None:
        await self._connection.execute(TAKE, self._consumer, self._owner)

    async def begin(self) -> None:
        await self._connection.execute(BEGIN, self._consumer, self._owner)

    async def finish(self, deleted: int) -> None:
        await self._connection.execute(FINISH, self._consumer, self._owner, deleted)

    async def go_on(self, end: int, *, durable: bool) -> bool:
        """Begin a step, in the open transaction; False if another process has taken over."""
        await self._connection.execute(UNHURRIED, LOCK_TIMEOUT, durable)
        return await self._connection.fetchval(GO_ON, self._consumer, self._owner, end) is not None

    async def delete(self, expired: Expired, first: int, end: int) -> int:
        """Delete what may go from these pages; return how many rows that were."""
        status = await self._connection.execute(DELETE, *expired.arguments(first, end))
        return int(status.rpartition(" ")[2])

    async def take_out(self, expired: Expired, first: int, end: int) -> list[tuple[int, str]]:
        """Delete what may go from these pages; return partition_id and row, as JSON, of each."""
        rows = await self._connection.fetch(TAKE_OUT, *expired.arguments(first, end))
        return [(row["partition_id"], row["message"]) for row in rows]

    async def note_archived(self, file: str, size: int, messages: int) -> None:
        """In the transaction that deletes them: so many messages are in the file, and so much of it counts."""
        await self._connection.execute(NOTE_ARCHIVED, file, self._consumer, size, messages)


def lock_key(consumer: str) -> int:
    """A signed 64-bit key; two consumers with the same key only wait for each other."""
    return int.from_bytes(hashlib.sha256(f"processor-retention:{consumer}".encode()).digest()[:8], "big", signed=True)
