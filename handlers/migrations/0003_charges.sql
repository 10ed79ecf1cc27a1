-- Charges of the billing example. Creates only; locks nothing that exists.

-- The message's id is what the gateway knows the charge by. A second row for it would be a second charge booked:
-- the primary key refuses that aloud instead of leaving it to be found.
CREATE TABLE charges (
    message_id   text        PRIMARY KEY,
    payment_id   text        NOT NULL,
    customer     text        NOT NULL,
    amount_cents bigint      NOT NULL CHECK (amount_cents > 0),
    gateway_id   text        NOT NULL,
    charged_at   timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX charges_customer ON charges (customer, charged_at);
