-- Charges of the billing example. Creates only; locks nothing that exists.

-- The gateway knows the charge by the message's id. A second row for it would book a second charge: the primary key
-- makes that an error, so that it cannot go unnoticed.
CREATE TABLE charges (
    message_id   text        PRIMARY KEY,
    payment_id   text        NOT NULL,
    customer     text        NOT NULL,
    amount_cents bigint      NOT NULL CHECK (amount_cents > 0),
    gateway_id   text        NOT NULL,
    charged_at   timestamptz NOT NULL DEFAULT now()
);

CREATE INDEX charges_customer ON charges (customer, charged_at);
