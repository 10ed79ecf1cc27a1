-- Retention: completed rows of the inbox go after their time. On the inbox it adds a column that may be NULL and changes
-- settings, which locks the table for a moment.

ALTER TABLE inbox ADD COLUMN seen_again_at timestamptz;  -- when a completed message came again, long after the last time

-- A round of retention frees rows all over the table, and each page is filled again: dead rows are cleared away soon, so
-- that they never are a large share, and nothing is gained by cutting off the end, which takes an exclusive lock.
ALTER TABLE inbox SET (autovacuum_vacuum_scale_factor = 0.03, autovacuum_vacuum_threshold = 10000,
                       vacuum_truncate = false);

-- Where the logs ended, and when. What lies at or above `log_end` arrived after `at`, by this server's clock; what was
-- read before `at` lies below it.
CREATE TABLE log_ends (
    partition_id integer     NOT NULL,  -- ledger.partition_id
    at           timestamptz NOT NULL,
    log_end      bigint      NOT NULL,
    PRIMARY KEY (partition_id, at)
);

-- One row per partition: how far its messages' ids may have been forgotten. What is read again below it would be handled
-- as if it were new.
CREATE TABLE forgotten (
    partition_id integer PRIMARY KEY,         -- ledger.partition_id
    below        bigint  NOT NULL DEFAULT 0,  -- ids of messages at offsets below this may be forgotten
    accepted     bigint,                      -- an operator accepts one rewind below it, to this offset or above
    accepted_by  text
);

-- One row per consumer: how far its present round through the inbox has come.
CREATE TABLE pruning (
    consumer    text        PRIMARY KEY,
    owner       text        NOT NULL,            -- only the process that it names may delete
    began_at    timestamptz NOT NULL,            -- of the present round, or of the last one
    page        bigint      NOT NULL DEFAULT 0,  -- of the inbox, where the round goes on
    finished_at timestamptz,                     -- of the last round; NULL while one is under way
    deleted     bigint                           -- rows, by the process that finished it
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);

-- One row per archive file: what it holds for certain. What a file has beyond that was not deleted from the inbox.
CREATE TABLE archived (
    file     text   PRIMARY KEY,  -- its name, without the directory
    consumer text   NOT NULL,
    bytes    bigint NOT NULL,
    messages bigint NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 1000);
