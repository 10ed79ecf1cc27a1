-- A double-entry ledger for the payments example. Creates only; locks nothing that exists.

CREATE TABLE accounts (
    account text           PRIMARY KEY,
    balance numeric(20, 2) NOT NULL DEFAULT 0
);

-- Two rows per transfer whose amounts add up to zero.
CREATE TABLE entries (
    transfer_id text           NOT NULL,
    account     text           NOT NULL,
    amount      numeric(20, 2) NOT NULL CHECK (amount <> 0),
    kind        text           NOT NULL CHECK (kind IN ('transfer', 'reversal')),
    booked_at   timestamptz    NOT NULL DEFAULT now()
);

CREATE INDEX entries_transfer ON entries (transfer_id);
