-- The tables that every guarantee depends on. It only creates, and locks no existing table.

CREATE TYPE inbox_status AS ENUM ('pending', 'processing', 'completed', 'failed', 'parked', 'discarded');

-- One row per message and consumer. The primary key guards against doing a message twice: nothing checks
-- first and acts later. Nearly all rows are of completed messages and kept as narrow as possible: such a
-- row is found by its key, or by its coordinates in Kafka.
CREATE TABLE inbox (
    key          uuid         PRIMARY KEY,  -- inbox_key(consumer, message_id)
    "offset"     bigint       NOT NULL,     -- where the message was first seen
    -- A default that differs from row to row keeps COPY from buffering a thousand rows, which costs more than it saves.
    received_at  timestamptz  NOT NULL DEFAULT clock_timestamp(),
    partition_id integer      NOT NULL,     -- ledger.partition_id
    payload_hash integer      NOT NULL,     -- CRC-32 of the value; tells a repetition from another message
    status       inbox_status NOT NULL DEFAULT 'completed',
    attempts     integer      NOT NULL DEFAULT 1,
    -- The rest is NULL if the first attempt succeeded and returned no result.
    message_id   text,
    type         text,
    finished_at  timestamptz,
    lease_until  timestamptz,               -- for status processing
    lease_owner  text,
    result       json,                      -- what the handler returned besides outputs
    error        json,                      -- the last failure: class, reason, message, exception, sqlstate, traceback
    record_key   bytea,                     -- this and the next three: a failed or parked record as it came
    payload      bytea,
    headers      json,
    timestamp_ms bigint,
    unfinished   integer,                   -- attempts that never ended, because the process died
    first_failed_at timestamptz,
    redriven_at  timestamptz,               -- sent to the input topic again, and not processed yet
    parked_key   bytea,                     -- set where later messages of this key have to wait: sha256(record_key)
    history      jsonb                      -- what happened to it, oldest first: retried, failed, redriven, discarded
);

-- The key of a message, to look one up by hand:
-- SELECT * FROM inbox WHERE key = inbox_key('inventory', 'placed-4711')
CREATE FUNCTION inbox_key(consumer text, message_id text) RETURNS uuid
    LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN encode(substr(sha256(convert_to(consumer || ':' || message_id, 'UTF8')), 1, 16), 'hex')::uuid;

-- Operators look for unfinished messages; completed rows stay out of this index.
CREATE INDEX inbox_unfinished ON inbox (partition_id, status, received_at) WHERE status <> 'completed';

-- A failed message and those that wait behind it because of their key, in order. It holds a digest, because a key may
-- be longer than an index entry.
CREATE INDEX inbox_parked ON inbox (partition_id, parked_key, "offset") WHERE parked_key IS NOT NULL;

-- The places where a message of a parked key came again in another partition than its row's: there, too, later messages
-- of the key wait until it is done.
CREATE TABLE parked_repeats (
    partition_id integer NOT NULL,  -- ledger.partition_id
    parked_key   bytea   NOT NULL,
    "offset"     bigint  NOT NULL,
    key          uuid    NOT NULL,  -- inbox.key
    PRIMARY KEY (partition_id, parked_key, "offset")
);

-- One row per partition: its owner (epoch), and how far its work is committed.
CREATE TABLE ledger (
    consumer     text        NOT NULL,
    topic        text        NOT NULL,
    partition    integer     NOT NULL,
    epoch        bigint      NOT NULL,
    topic_id     text        NOT NULL,  -- tells a recreated topic from the old one
    partitions   integer     NOT NULL,  -- of the topic when this row was made; later ones were added since
    first_offset bigint      NOT NULL,  -- at the last batch, everything below was known to be published
    next_offset  bigint      NOT NULL,  -- everything below is applied
    owner        text        NOT NULL,
    slot         integer,               -- of the owner; NULL if it died and left no open Kafka transaction
    unfinished_owners integer NOT NULL DEFAULT 0,  -- owners that began to work since a batch was last committed
    in_progress  int8range,             -- the offsets being handled, marked only while a deadly record is searched
    suspects     int8range,             -- the offsets that were in progress when the last owner died
    deaths       integer     NOT NULL DEFAULT 0,  -- owners in a row that died at exactly these offsets
    partition_id integer     NOT NULL GENERATED ALWAYS AS IDENTITY UNIQUE,  -- this partition's number in the inbox
    former       integer[]   NOT NULL DEFAULT '{}',  -- its numbers for earlier, deleted topics of the same name
    first_epoch  bigint      NOT NULL DEFAULT 0,  -- offsets committed under an older epoch belong to those topics
    updated_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, topic, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- The outputs of committed batches, one row per partition and batch, until Kafka is known to have them.
CREATE TABLE unsent (
    partition_id integer NOT NULL,      -- ledger.partition_id
    next_offset  bigint  NOT NULL,      -- of the batch
    outputs      bytea   NOT NULL,
    PRIMARY KEY (partition_id, next_offset)
) WITH (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);

-- Rows live for a moment only: compressing them would cost more than it saves.
ALTER TABLE unsent ALTER COLUMN outputs SET STORAGE EXTERNAL;
