-- Stock and reservations of the inventory example. Creates only; locks nothing that exists.

CREATE TABLE stock (
    sku      text    PRIMARY KEY,
    on_hand  integer NOT NULL CHECK (on_hand >= 0),
    reserved integer NOT NULL DEFAULT 0 CHECK (reserved >= 0)
);

CREATE TABLE reservations (
    order_id    text        NOT NULL,
    sku         text        NOT NULL,
    quantity    integer     NOT NULL CHECK (quantity > 0),
    reserved_at timestamptz NOT NULL DEFAULT now()
);

-- Deliberately no unique constraint on order_id: that an order is reserved once is the processor's
-- promise, and a test that counts rows must be able to see it broken.
CREATE INDEX reservations_order ON reservations (order_id);
