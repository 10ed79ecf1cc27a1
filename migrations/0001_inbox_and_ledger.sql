-- The two tables that every guarantee rests on. Creates only; locks nothing that exists.

CREATE TYPE inbox_status AS ENUM ('pending', 'processing', 'completed', 'failed', 'parked', 'discarded');

-- One row per message and consumer. The primary key is the guard against doing a message twice:
-- nothing checks first and acts later.
CREATE TABLE inbox (
    consumer     text         NOT NULL,
    message_id   text         NOT NULL,
    topic        text         NOT NULL,  -- where the message was first seen
    partition    integer      NOT NULL,
    "offset"     bigint       NOT NULL,
    status       inbox_status NOT NULL,
    attempts     integer      NOT NULL DEFAULT 1,
    type         text,
    payload_hash bytea,                  -- NULL for a delete marker
    received_at  timestamptz  NOT NULL DEFAULT now(),
    finished_at  timestamptz,            -- NULL while the first attempt is the only one
    lease_until  timestamptz,            -- for status processing
    lease_owner  text,
    result       json,                   -- what the handler returned besides outputs
    error        json,                   -- for status failed: reason, message, traceback
    key          bytea,                  -- for status failed: the record as it came
    payload      bytea,
    headers      json,
    PRIMARY KEY (consumer, message_id)
);

-- Operators look for what is not done; completed rows, nearly all of them, stay out of this index.
CREATE INDEX inbox_unfinished ON inbox (consumer, status, received_at) WHERE status <> 'completed';

-- One row per partition: who owns it (epoch), how far its work is committed, and the outputs of
-- the last committed batch until Kafka is known to have them.
CREATE TABLE ledger (
    consumer     text        NOT NULL,
    topic        text        NOT NULL,
    partition    integer     NOT NULL,
    epoch        bigint      NOT NULL,
    topic_id     text        NOT NULL,  -- a re-created topic must not be mistaken for the old one
    first_offset bigint      NOT NULL,
    next_offset  bigint      NOT NULL,
    outputs      bytea,                 -- NULL: nothing to send, or known to be sent
    owner        text        NOT NULL,
    updated_at   timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (consumer, topic, partition)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000,
        toast.autovacuum_vacuum_scale_factor = 0, toast.autovacuum_vacuum_threshold = 5000);

-- Overwritten with every batch: compressing it would cost more than it saves.
ALTER TABLE ledger ALTER COLUMN outputs SET STORAGE EXTERNAL;
