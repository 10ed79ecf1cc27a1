"""How far the ids of messages have been forgotten, and how far they may be.

The SQL of the tables log_ends and forgotten is here. Both uses rest on one fact, by one clock: at a certain time a log
ended at a certain offset. What lies above arrived later, so it bounds what can still come; what had been read by then
lies below, so it bounds what has been forgotten.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING

from processor.messages.message import Partition
from processor.postgres import replays

if TYPE_CHECKING:
    from processor.postgres.session import Connection

WATERMARKS = """
    SELECT l.topic, l.partition, f.below, f.accepted FROM forgotten f
    JOIN ledger l ON l.partition_id = f.partition_id
    WHERE l.consumer = $1 ORDER BY f.partition_id
"""

# The same, and until the end of the transaction the watermarks stay where they are.
HOLD_WATERMARKS = WATERMARKS + " FOR SHARE OF f"

ACCEPT = """
    INSERT INTO forgotten (partition_id, accepted, accepted_by)
    SELECT partition_id, $4, $5 FROM ledger WHERE consumer = $1 AND topic = $2 AND partition = $3
    ON CONFLICT (partition_id) DO UPDATE SET accepted = excluded.accepted, accepted_by = excluded.accepted_by
"""

# There is something to lock before the first survey, too.
MAKE_WATERMARK = "INSERT INTO forgotten (partition_id) VALUES ($1) ON CONFLICT DO NOTHING"

# Waits for a process that raises the watermark, and makes the next one wait until the ledger's position has moved.
HOLD = "SELECT below, accepted FROM forgotten WHERE partition_id = $1 FOR UPDATE"

# An acceptance is for one rewind.
USE_UP = "UPDATE forgotten SET accepted = NULL, accepted_by = NULL WHERE partition_id = $1"

WITHDRAW = """
    UPDATE forgotten f SET accepted = NULL, accepted_by = NULL FROM ledger l
    WHERE l.consumer = $1 AND l.topic = $2 AND l.partition = $3 AND f.partition_id = l.partition_id
"""

# While retention is held, every member asks again and again: a note says as much as those that follow it soon.
NOTE_ENDS = """
    INSERT INTO log_ends (partition_id, at, log_end)
    SELECT p.partition_id, $1, p.log_end FROM unnest($2::integer[], $3::bigint[]) AS p(partition_id, log_end)
    WHERE NOT EXISTS (SELECT FROM log_ends e
                      WHERE e.partition_id = p.partition_id AND e.at > $1::timestamptz - $4::interval AND e.at <= $1)
    ON CONFLICT DO NOTHING
"""

# A time after which all that lies at or above these positions has arrived; NULL if nobody knows.
ARRIVED_SINCE = """
    SELECT p.partition_id,
           (SELECT max(e.at) FROM log_ends e WHERE e.partition_id = p.partition_id AND e.log_end <= p.position) AS since
    FROM unnest($1::integer[], $2::bigint[]) AS p(partition_id, position)
"""

MAKE_WATERMARKS = """
    INSERT INTO forgotten (partition_id) SELECT partition_id FROM ledger WHERE consumer = $1
    ORDER BY partition_id ON CONFLICT DO NOTHING
"""

# What was read before the time, wherever it was read, lies below these. An acceptance was for less.
RAISE = """
    WITH mine AS (
        SELECT f.partition_id, l.next_offset FROM forgotten f JOIN ledger l ON l.partition_id = f.partition_id
        WHERE l.consumer = $1 ORDER BY f.partition_id FOR UPDATE OF f
    ), found AS (
        SELECT partition_id, coalesce((SELECT e.log_end FROM log_ends e
                                       WHERE e.partition_id = mine.partition_id AND e.at >= $2
                                       ORDER BY e.at LIMIT 1), next_offset) AS below
        FROM mine
    )
    UPDATE forgotten f SET below = found.below, accepted = NULL, accepted_by = NULL
    FROM found WHERE f.partition_id = found.partition_id AND f.below < found.below
"""

# Where something still has to be read from below. A statement of its own: it sees what the one above has waited for.
BEHIND = """
    SELECT count(*) FROM forgotten f JOIN ledger l ON l.partition_id = f.partition_id
    LEFT JOIN unnest($2::integer[], $3::bigint[]) AS n(partition_id, lowest) ON n.partition_id = f.partition_id
    WHERE l.consumer = $1 AND least(l.next_offset, n.lowest) < f.below
"""

FORGET_ENDS = """
    DELETE FROM log_ends e USING ledger l
    WHERE l.consumer = $1 AND (e.partition_id = l.partition_id AND e.at < $2 OR e.partition_id = ANY (l.former))
"""

NOW = "SELECT clock_timestamp()"


@dataclass(frozen=True, slots=True)
class Watermark:
    """How far the ids of a partition's messages may have been forgotten."""

    below: int = 0  # ids of messages at offsets below this may be
    accepted: int | None = None  # an operator accepts one rewind below it, to this offset or above

    def allows(self, offset: int) -> bool:
        """Whether the partition may be read again from there."""
        return offset >= self.below or (self.accepted is not None and offset >= self.accepted)


NOTHING_FORGOTTEN = Watermark()


async def watermarks(connection: Connection, consumer: str, *, hold: bool = False) -> dict[Partition, Watermark]:
    """Return the watermarks of a consumer; a partition that is absent has forgotten nothing.

    With `hold` they stay where they are until the end of the open transaction: for whoever writes down in it that
    something is still needed.
    """
    if hold:
        await connection.execute(MAKE_WATERMARKS, consumer)
    rows = await connection.fetch(HOLD_WATERMARKS if hold else WATERMARKS, consumer)
    return {Partition(row["topic"], row["partition"]): Watermark(row["below"], row["accepted"]) for row in rows}


async def accept(connection: Connection, consumer: str, partition: Partition, offset: int, by: str) -> None:
    """An operator accepts that what was forgotten is handled again from this offset on, for one rewind."""
    await connection.execute(ACCEPT, consumer, partition.topic, partition.number, offset, by)


async def withdraw(connection: Connection, consumer: str, partition: Partition) -> None:
    """What an operator has accepted and no rewind has used up does not hold any longer."""
    await connection.execute(WITHDRAW, consumer, partition.topic, partition.number)


async def may_move(connection: Connection, partition_id: int, position: int, offset: int) -> bool:
    """Whether the ledger may move from its position to this offset, in the open transaction.

    At or above the position nothing is read again, also when that lies below the watermark since an accepted rewind. An
    acceptance is for the offset that was set when it was given, so that any move uses it up.
    """
    await connection.execute(MAKE_WATERMARK, partition_id)
    row = await connection.fetchrow(HOLD, partition_id)
    assert row is not None
    if offset < position and not Watermark(**row).allows(offset):
        return False
    if row["accepted"] is not None:
        await connection.execute(USE_UP, partition_id)
    return True


# --- how far ids may be forgotten ---


async def now(connection: Connection) -> datetime:
    """The server's time, the only clock that retention goes by."""
    found: datetime = await connection.fetchval(NOW)
    return found


async def note_log_ends(
    connection: Connection, consumer: str, at: datetime, ends: Mapping[int, int], every: timedelta
) -> None:
    """Keep where the logs ended, unless the last note is more recent. `at` is a time before the brokers were asked."""
    await connection.execute(MAKE_WATERMARKS, consumer)
    await connection.execute(NOTE_ENDS, at, list(ends), list(ends.values()), every)


async def arrived_since(connection: Connection, positions: Mapping[int, int]) -> dict[int, datetime | None]:
    """By partition a time after which all that lies at or above this position has arrived; None if unknown."""
    rows = await connection.fetch(ARRIVED_SINCE, list(positions), list(positions.values()))
    return {row["partition_id"]: row["since"] for row in rows}


async def raise_watermarks(connection: Connection, consumer: str, before: datetime) -> bool:
    """In the open transaction: note that ids of what was read before this time are forgotten.

    False, and the transaction has to be rolled back, if something still has to be read from below: since this time was
    found, an operator has moved the ledger back, or begun a replay.
    """
    await connection.execute(RAISE, consumer, before)
    needed = await replays.lowest_needed(connection, consumer)
    behind: int = await connection.fetchval(BEHIND, consumer, list(needed), list(needed.values()))
    return behind == 0


async def forget_log_ends(connection: Connection, consumer: str, before: datetime) -> None:
    await connection.execute(FORGET_ENDS, consumer, before)
