"""What every peer does with an order, so that they differ in the library and in nothing else: job file and SQL.

A batch is two statements, with arrays as arguments: `CLAIM` records the event ids and tells which were new, `RESERVE`
books the new ones. One order is one statement, `RESERVE_ONE`. Each parameter occurs once and in order, so the same
text serves asyncpg and, through `for_psycopg`, psycopg.

An order that was seen before is not booked again, but its output is made again: nobody but the event knows what it
was. So rows happen once, and outputs as often as the library delivers the record.
"""

import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    import psycopg

Order = dict[str, Any]

CREATE_SEEN = "CREATE TABLE IF NOT EXISTS seen (event_id text PRIMARY KEY)"

CLAIM = "INSERT INTO seen (event_id) SELECT unnest($1::text[]) ON CONFLICT DO NOTHING RETURNING event_id"

RESERVE = """
WITH placed AS (
    INSERT INTO reservations (order_id, sku, quantity)
    SELECT * FROM unnest($1::text[], $2::text[], $3::integer[])
    RETURNING sku, quantity
)
UPDATE stock SET reserved = reserved + total
FROM (SELECT sku, sum(quantity) AS total FROM placed GROUP BY sku) AS ordered
WHERE stock.sku = ordered.sku
"""

RESERVE_ONE = """
WITH fresh AS (
    INSERT INTO seen (event_id) VALUES ($1) ON CONFLICT DO NOTHING RETURNING event_id
), placed AS (
    INSERT INTO reservations (order_id, sku, quantity)
    SELECT $2::text, $3::text, $4::integer FROM fresh
    RETURNING sku, quantity
)
UPDATE stock SET reserved = reserved + placed.quantity FROM placed WHERE stock.sku = placed.sku
"""


@dataclass(frozen=True, slots=True)
class Job:
    bootstrap_servers: str
    database: str
    input: str
    output: str
    group: str
    batch: int
    linger_ms: int

    @property
    def linger(self) -> float:
        """Seconds to wait for a batch to fill."""
        return self.linger_ms / 1000


def read_job() -> Job:
    values = orjson.loads(Path(os.environ["BENCH_JOB"]).read_bytes())
    return Job(**{field.name: values[field.name] for field in fields(Job)})


def for_psycopg(sql: str) -> str:
    """The same statement with psycopg's placeholders; binary ones, which take an array in half the time of text."""
    return re.sub(r"\$\d", "%b", sql)


CLAIM_FOR_PSYCOPG = for_psycopg(CLAIM)
RESERVE_FOR_PSYCOPG = for_psycopg(RESERVE)


def by_event_id(orders: list[Order]) -> dict[str, Order]:
    """Each event of a batch once."""
    return {order["event_id"]: order for order in orders}


def columns(orders: list[Order]) -> tuple[list[str], list[str], list[int]]:
    """The arguments of `RESERVE`."""
    return (
        [order["order_id"] for order in orders],
        [order["sku"] for order in orders],
        [order["quantity"] for order in orders],
    )


def book(database: "psycopg.Connection", orders: list[Order]) -> None:
    """The rows of a batch in one transaction."""
    events = by_event_id(orders)
    with database.transaction():
        fresh = database.execute(CLAIM_FOR_PSYCOPG, (list(events),), prepare=True).fetchall()
        if fresh:
            new = orders if len(fresh) == len(orders) else [events[event_id] for (event_id,) in fresh]
            database.execute(RESERVE_FOR_PSYCOPG, columns(new), prepare=True)


def output(order: Order) -> dict[str, Any]:
    return {"order_id": order["order_id"], "sku": order["sku"], "quantity": order["quantity"]}
