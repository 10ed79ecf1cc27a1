-- Replays: ranges of the input that are gone over again beside the live service. It only creates.

CREATE TABLE replays (
    consumer text  NOT NULL,                 -- the live one, whose records are gone over
    name     text  NOT NULL,
    state    text  NOT NULL DEFAULT 'active' CHECK (state IN ('active', 'paused', 'cancelled', 'finished')),
    plan     jsonb NOT NULL,                 -- what was asked for: mode, filters, rate and so on
    history  jsonb NOT NULL DEFAULT '[]',    -- what was done to it, oldest first: when, by whom, why
    PRIMARY KEY (consumer, name)
);

-- What a replay goes over. How far it has come is in the ledger: `next_offset` of its own row there, whose consumer is
-- CONSUMER.replay.NAME.
CREATE TABLE replay_ranges (
    partition_id      integer NOT NULL PRIMARY KEY,  -- ledger.partition_id of the replay's own row
    consumer          text    NOT NULL,
    name              text    NOT NULL,
    live_partition_id integer NOT NULL,  -- ledger.partition_id of the live row, which names the partition in the inbox
    first_offset      bigint  NOT NULL,
    end_offset        bigint  NOT NULL,
    applied_below     bigint  NOT NULL,  -- the live service had applied everything below when the replay was made
    silent_below      bigint  NOT NULL,  -- outputs of records from there to here are in Kafka already: not sent again
    processed         bigint  NOT NULL DEFAULT 0,
    skipped           bigint  NOT NULL DEFAULT 0,
    failed            bigint  NOT NULL DEFAULT 0,
    outputs           bigint  NOT NULL DEFAULT 0,
    FOREIGN KEY (consumer, name) REFERENCES replays ON DELETE CASCADE
) WITH (fillfactor = 50);

CREATE INDEX replay_ranges_of ON replay_ranges (consumer, name);
