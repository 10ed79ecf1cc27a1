-- Why a partition stands still, for `processor status`, which asks from any machine. It only creates, and locks no
-- existing table. Nothing depends on these rows: processes work as well without them.

CREATE TABLE partition_trouble (
    consumer  text        NOT NULL,
    topic     text        NOT NULL,
    partition integer     NOT NULL,
    kind      text        NOT NULL,  -- halted, recovering, outage or retry
    reason    text        NOT NULL,
    since     timestamptz NOT NULL,
    epoch     bigint      NOT NULL,  -- of the partition's owner; a newer one has taken over
    backend   integer     NOT NULL,  -- holds the slot's lock of the process that wrote this, as long as that lives
    PRIMARY KEY (consumer, topic, partition)
);
