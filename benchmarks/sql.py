"""The work in SQL, the same text for every subject that may choose its statements."""

from __future__ import annotations

SKUS = 1000

TABLES = f"""
    CREATE TABLE reservations (order_id text PRIMARY KEY, sku text NOT NULL, quantity integer NOT NULL);
    CREATE TABLE stock (sku text PRIMARY KEY, on_hand integer NOT NULL, reserved integer NOT NULL);
    INSERT INTO stock SELECT 'sku-' || n, 2000000000, 0 FROM generate_series(0, {SKUS - 1}) AS n;
    ANALYZE stock;
"""  # noqa: S608 - a constant of ours

INSERT_ONE = "INSERT INTO reservations (order_id, sku, quantity) VALUES ($1, $2, $3)"
UPDATE_ONE = "UPDATE stock SET reserved = reserved + $2 WHERE sku = $1"

# What a handler that decides asks and does.
LOOK_AT_ONE = "SELECT on_hand - reserved AS free FROM stock WHERE sku = $1"
TAKE_ONE = """
    WITH reserved AS (INSERT INTO reservations (order_id, sku, quantity) VALUES ($1, $2, $3))
    UPDATE stock SET reserved = reserved + $3 WHERE sku = $2
"""

INSERT_MANY = """
    INSERT INTO reservations (order_id, sku, quantity)
    SELECT * FROM unnest($1::text[], $2::text[], $3::integer[])
"""

# Rows are locked in the order of their skus: two writers wait for each other, but never in a circle.
UPDATE_MANY = """
    WITH wanted AS (
        SELECT sku, sum(quantity) AS quantity FROM unnest($1::text[], $2::integer[]) AS o(sku, quantity) GROUP BY sku
    ), locked AS (
        SELECT stock.sku FROM stock JOIN wanted USING (sku) ORDER BY stock.sku FOR UPDATE OF stock
    )
    UPDATE stock SET reserved = stock.reserved + wanted.quantity
    FROM wanted JOIN locked USING (sku) WHERE stock.sku = wanted.sku
"""
