"""What the inbox keeps of a message besides its claim: evidence and results, attempts that begin and end, leases.

A row per message and consumer; claims.py makes it. What is here changes rows of messages that are ours to handle.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from processor.errors import Fenced
from processor.messages import wire
from processor.messages.failure import Failure
from processor.postgres import parked_keys
from processor.postgres.rows import columns_of, uuids

if TYPE_CHECKING:
    from asyncpg import Connection
    from asyncpg import Record as Row

    from processor.messages.record import Record

HISTORY = 100

# Keeps the record as it came: with its error if it failed, without one if it is parked.
KEEP = """
    INSERT INTO inbox (key, partition_id, "offset", payload_hash, status, message_id, type, finished_at, error,
                       record_key, payload, headers, timestamp_ms, first_failed_at, parked_key, history)
    SELECT m.key, m.partition_id, m.position, m.hash, m.status::inbox_status, m.id, m.type,
           CASE WHEN m.reason IS NOT NULL THEN t.now END, m.error, m.record_key, m.payload, m.headers, m.at,
           CASE WHEN m.reason IS NOT NULL THEN coalesce(m.first, t.now) END, m.parked_key,
           CASE WHEN m.reason IS NOT NULL THEN jsonb_build_array(jsonb_strip_nulls(
               jsonb_build_object('at', t.now, 'event', 'failed', 'class', m.class, 'reason', m.reason,
                                  'exception', m.exception, 'sqlstate', m.sqlstate))) END
    FROM unnest($1::uuid[], $2::integer[], $3::bigint[], $4::integer[], $5::text[], $6::text[], $7::json[],
                $8::bytea[], $9::bytea[], $10::json[], $11::bigint[], $12::text[], $13::timestamptz[], $14::bytea[],
                $15::text[], $16::text[], $17::text[], $18::text[])
         AS m(key, partition_id, position, hash, id, type, error, record_key, payload, headers, at, status, first,
              parked_key, class, reason, exception, sqlstate),
         (SELECT clock_timestamp()) AS t(now)
    ORDER BY m.key
    ON CONFLICT (key) DO UPDATE
    SET status = excluded.status, finished_at = excluded.finished_at, message_id = excluded.message_id,
        type = excluded.type, error = excluded.error, record_key = excluded.record_key, payload = excluded.payload,
        headers = excluded.headers, timestamp_ms = excluded.timestamp_ms, parked_key = excluded.parked_key,
        first_failed_at = coalesce(inbox.first_failed_at, excluded.first_failed_at),
        unfinished = NULL, lease_owner = NULL, lease_until = NULL, redriven_at = NULL,
        history = coalesce(inbox.history || excluded.history, excluded.history, inbox.history),
        -- rows claimed in this transaction are completed, with their attempt already counted
        attempts = inbox.attempts + (inbox.status = 'failed')::integer
"""

# Records the start of an attempt, so that it leaves a trace if it never ends, or if it fails and another follows. It
# runs in a transaction of its own. It does nothing for a process that no longer owns the partition, nor for another
# payload than the row's: that would take over the row of the message that had the id first. A replay ($13 is false)
# leaves rows alone that wait behind a failed message of their key, and that message.
START = """
    WITH owner AS (SELECT FROM ledger WHERE partition_id = $12 AND epoch = $5 FOR SHARE)
    INSERT INTO inbox (key, partition_id, "offset", payload_hash, status, attempts, unfinished, message_id, type,
                       record_key, lease_owner, lease_until)
    SELECT $1, $2, $3, $4, $6::inbox_status, 0, 1, $7, $8, $9, $10, now() + $11::interval FROM owner
    ON CONFLICT (key) DO UPDATE
    SET status = excluded.status, lease_owner = excluded.lease_owner, lease_until = excluded.lease_until,
        -- a process that begins it again is alive, so it cannot have died at it: only others can
        unfinished = greatest(
            coalesce(inbox.unfinished, 0) + (inbox.lease_owner IS DISTINCT FROM excluded.lease_owner)::integer, 1
        ),
        attempts = CASE WHEN inbox.status IN ('failed', 'parked') THEN 0 ELSE inbox.attempts END
    WHERE inbox.payload_hash = excluded.payload_hash AND ($13 OR inbox.parked_key IS NULL)
      AND (inbox.status IN ('failed', 'pending', 'parked')
           OR inbox.status = 'processing' AND (inbox.lease_owner = excluded.lease_owner OR inbox.lease_until < now()))
    RETURNING attempts, unfinished, first_failed_at
"""

# The history says of each attempt how it failed. It stops growing at HISTORY events, as `retry.attempts` has no limit.
NOTE = f"""
    WITH owner AS (SELECT FROM ledger WHERE partition_id = $18 AND epoch = $5 FOR SHARE),
         event AS (SELECT jsonb_build_array(jsonb_strip_nulls(
             jsonb_build_object('at', clock_timestamp(), 'event', 'retried', 'class', $14::text, 'reason', $15::text,
                                'exception', $16::text, 'sqlstate', $17::text))) AS events)
    INSERT INTO inbox (key, partition_id, "offset", payload_hash, status, attempts, message_id, type, record_key, error,
                       payload, headers, timestamp_ms, first_failed_at, history)
    SELECT $1, $2, $3, $4, 'pending', 1, $6, $7, $8, $9, $10, $11, $12, clock_timestamp(), event.events
    FROM owner, event
    ON CONFLICT (key) DO UPDATE
    SET status = 'pending', unfinished = NULL, lease_owner = NULL, lease_until = NULL, redriven_at = NULL,
        error = excluded.error, record_key = excluded.record_key, payload = excluded.payload,
        headers = excluded.headers, timestamp_ms = excluded.timestamp_ms, message_id = excluded.message_id,
        type = excluded.type, first_failed_at = coalesce(inbox.first_failed_at, clock_timestamp()),
        attempts = CASE WHEN inbox.status = 'pending' OR inbox.status = 'processing' THEN inbox.attempts + 1 ELSE 1 END,
        history = CASE WHEN jsonb_array_length(inbox.history) >= {HISTORY} THEN inbox.history
                       ELSE coalesce(inbox.history, '[]') || excluded.history END
    WHERE inbox.payload_hash = excluded.payload_hash
      AND (inbox.status IN ('failed', 'pending', 'parked')
           OR inbox.status = 'processing' AND inbox.lease_owner = $13)
    RETURNING attempts, first_failed_at
"""  # noqa: S608 - a constant of ours

# Takes an attempt back while we live: it must not look as if it had killed us. If it was cancelled ($3 is false), its
# call outside may not have ended yet: then the lease stays.
ABANDON = """
    UPDATE inbox
    SET unfinished = nullif(unfinished - 1, 0),
        lease_owner = CASE WHEN status = 'processing' AND NOT $3 THEN lease_owner END,
        lease_until = CASE WHEN status = 'processing' AND NOT $3 THEN lease_until END,
        status = CASE WHEN $3 THEN 'pending' ELSE status END
    WHERE key = ANY ($1::uuid[]) AND lease_owner = $2 AND status IN ('pending', 'processing')
"""

RENEW = """
    UPDATE inbox SET lease_until = now() + $3::interval
    WHERE key = $1 AND status = 'processing' AND lease_owner = $2 RETURNING 1
"""

# Frees messages whose lease has expired, since its holder must have died. They are tried again with the same id.
REAP = """
    WITH expired AS (
        SELECT key FROM inbox
        WHERE partition_id = ANY ($1::integer[]) AND status = 'processing' AND lease_until < now()
        FOR UPDATE SKIP LOCKED  -- a locked row is being taken over
    )
    UPDATE inbox SET status = 'pending', lease_owner = NULL, lease_until = NULL
    FROM expired WHERE inbox.key = expired.key
    RETURNING message_id
"""

KEEP_RESULTS = """
    UPDATE inbox SET result = m.result, message_id = m.id
    FROM unnest($1::uuid[], $2::text[], $3::json[]) AS m(key, id, result)
    -- ANY repeats the join's condition: it makes the planner use the index whatever the table's size
    WHERE inbox.key = m.key AND inbox.key = ANY ($1::uuid[])
"""


class Inbox:
    def __init__(self, key_of: Callable[[str], bytes], owner: str, lease_ms: int, *, takes_waiting: bool) -> None:
        self._key_of = key_of
        self._takes_waiting = takes_waiting
        self._owner = owner
        self._lease = timedelta(milliseconds=lease_ms)

    async def keep(self, connection: Connection[Row], records: Sequence[Record], *, park: bool) -> None:
        """Keep failed and parked records as they came; this changes rows that were claimed as completed.

        With `park`, later messages of a failed one's key have to wait.
        """
        if not records:
            return
        failures = [None if record.parked else record.failure for record in records]
        ids = [_row_id(record) for record in records]
        await connection.execute(
            KEEP,
            uuids(map(self._key_of, ids)),
            *columns_of(records),
            ids,
            [record.message.type for record in records],
            [failure and wire.dump_error(failure) for failure in failures],
            [record.message.key for record in records],
            [record.payload for record in records],
            [wire.dump_headers(record.message.headers) for record in records],
            [record.message.timestamp_ms for record in records],
            ["parked" if record.parked else "failed" for record in records],
            [record.first_failed_at for record in records],
            [
                parked_keys.digest(record.message.key)
                if record.message.key is not None and (park or record.parked)
                else None
                for record in records
            ],
            [failure and failure.kind for failure in failures],
            [failure and failure.reason for failure in failures],
            [failure and failure.exception for failure in failures],
            [failure and failure.sqlstate for failure in failures],
        )
        await parked_keys.repeat(connection, [one for one in records if one.elsewhere and (park or one.parked)])

    async def start(self, connection: Connection[Row], record: Record, *, leased: bool = False) -> bool:
        """Record that an attempt begins; return False if none is to be made, or not by us.

        If `leased`, the message is ours alone until it is done or the lease expires.
        """
        row = await connection.fetchrow(
            START,
            record.key.hex(),
            record.reading.partition_id,
            record.message.offset,
            record.payload_hash,
            record.reading.epoch,
            "processing" if leased else "pending",
            record.message.id,
            record.message.type,
            record.message.key,
            self._owner,
            self._lease if leased else None,
            record.reading.ledger_id,
            self._takes_waiting,
        )
        if row is None:
            return False
        record.attempts, record.unfinished = max(record.attempts, row["attempts"]), row["unfinished"] - 1
        record.first_failed_at = row["first_failed_at"]
        record.message.attempt = record.attempts + 1
        return True

    async def abandon(self, connection: Connection[Row], records: Sequence[Record], *, ended: bool) -> None:
        """Take back the start of attempts that ended without an outcome, or were cancelled, while we live."""
        begun = [record for record in records if record.begun]
        if begun:
            await connection.execute(ABANDON, uuids(record.key for record in begun), self._owner, ended)
            for record in begun:
                record.begun = False

    async def note(self, connection: Connection[Row], record: Record, failure: Failure) -> None:
        """Keep a failed attempt that another one will follow; raise Fenced if the message is not ours to try."""
        row = await connection.fetchrow(
            NOTE,
            record.key.hex(),
            record.reading.partition_id,
            record.message.offset,
            record.payload_hash,
            record.reading.epoch,
            record.message.id,
            record.message.type,
            record.message.key,
            wire.dump_error(failure),
            record.payload,
            wire.dump_headers(record.message.headers),
            record.message.timestamp_ms,
            self._owner,
            failure.kind,
            failure.reason,
            failure.exception,
            failure.sqlstate,
            record.reading.ledger_id,
        )
        if row is None:
            raise Fenced(f"{record.coordinates}: another instance has the partition, or has done the message")
        record.attempts, record.first_failed_at = row["attempts"], row["first_failed_at"]

    async def renew(self, connection: Connection[Row], record: Record) -> bool:
        """Renew the lease; return False if it is no longer ours."""
        return await connection.fetchval(RENEW, record.key.hex(), self._owner, self._lease) is not None

    async def reap(self, connection: Connection[Row], partition_ids: Sequence[int]) -> list[str]:
        """Free messages whose lease has expired; return their ids."""
        return [row[0] for row in await connection.fetch(REAP, partition_ids)]

    async def keep_results(self, connection: Connection[Row], results: Sequence[tuple[Record, str]]) -> None:
        """Keep results in the messages' rows. A type without inbox has none, and must not touch another message's."""
        results = [(record, result) for record, result in results if record.in_inbox]
        if results:
            await connection.execute(
                KEEP_RESULTS,
                uuids(record.key for record, _ in results),
                [record.message.id for record, _ in results],
                [result for _, result in results],
            )


def _row_id(record: Record) -> str:
    """Return the id of the row that keeps a failure. A type without inbox must not touch another message's row."""
    return record.message.id if record.in_inbox else record.id_of_its_own
