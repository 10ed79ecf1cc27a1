"""Inventory: reserve stock for orders as far as there is any, and report the outcome of each."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, Field

from processor import Database, Message, Output, Reject

RESULTS = "reservations"

Quantity = Annotated[int, Field(gt=0, lt=2**31)]


class OrderPlaced(BaseModel):
    order_id: str
    sku: str
    quantity: Quantity


class StockCounted(BaseModel):
    sku: str
    on_hand: Annotated[int, Field(ge=0, lt=2**31)]


async def reserve(message: Message[OrderPlaced], db: Database) -> Output:
    """Reserve if the stock allows it; either way the customer is notified, once."""
    order = message.value
    left = await db.fetchval(
        "UPDATE stock SET reserved = reserved + $2 WHERE sku = $1 AND reserved + $2 <= on_hand"
        " RETURNING on_hand - reserved",
        order.sku,
        order.quantity,
    )
    if left is None:
        if not await db.fetchval("SELECT EXISTS (SELECT FROM stock WHERE sku = $1)", order.sku):
            raise Reject(f"order {order.order_id}: no such sku {order.sku!r}")
        return _answer(message, "OrderRejected")
    db.write(
        "INSERT INTO reservations (order_id, sku, quantity) VALUES ($1, $2, $3)",
        order.order_id,
        order.sku,
        order.quantity,
    )
    return _answer(message, "OrderReserved", left=left)


async def reserve_many(messages: list[Message[OrderPlaced]], db: Database) -> list[Output]:
    """Reserve for a whole batch in two statements: first come, first served within each sku.

    An order that does not fit does not hold up smaller ones in later batches. But within this batch all later orders
    for the same sku are rejected too: sums are cheaper than a loop.
    """
    orders = [message.value for message in messages]
    fits = await db.fetch(
        """
        WITH wanted AS (
            SELECT o.place, o.sku, o.quantity, sum(o.quantity) OVER (PARTITION BY o.sku ORDER BY o.place) AS so_far
            FROM unnest($1::text[], $2::integer[]) WITH ORDINALITY AS o(sku, quantity, place)
        ), locked AS (
            SELECT sku, on_hand - reserved AS free FROM stock
            WHERE sku = ANY ($1::text[]) ORDER BY sku FOR UPDATE
        ), granted AS (
            SELECT wanted.place, wanted.sku, wanted.quantity, locked.free - wanted.so_far AS left_over
            FROM wanted JOIN locked USING (sku) WHERE wanted.so_far <= locked.free
        ), taken AS (
            UPDATE stock SET reserved = reserved + g.total
            FROM (SELECT sku, sum(quantity) AS total FROM granted GROUP BY sku) AS g WHERE stock.sku = g.sku
        )
        SELECT place, left_over FROM granted
        """,
        [order.sku for order in orders],
        [order.quantity for order in orders],
    )
    left = {row["place"] - 1: int(row["left_over"]) for row in fits}
    reserved = [order for index, order in enumerate(orders) if index in left]
    await db.execute(
        "INSERT INTO reservations (order_id, sku, quantity)"
        " SELECT * FROM unnest($1::text[], $2::text[], $3::integer[])",
        [order.order_id for order in reserved],
        [order.sku for order in reserved],
        [order.quantity for order in reserved],
    )
    return [
        _answer(message, "OrderReserved", left=left[index]) if index in left else _answer(message, "OrderRejected")
        for index, message in enumerate(messages)
    ]


async def count(message: Message[StockCounted], db: Database) -> None:
    """Set the stock on hand. This is idempotent, so the type may do without the inbox."""
    db.write(
        "INSERT INTO stock (sku, on_hand) VALUES ($1, $2) ON CONFLICT (sku) DO UPDATE SET on_hand = excluded.on_hand",
        message.value.sku,
        message.value.on_hand,
    )


def _answer(message: Message[OrderPlaced], type_: str, **facts: int) -> Output:
    order = message.value
    value = {"order_id": order.order_id, "sku": order.sku, "quantity": order.quantity, **facts}
    return Output(RESULTS, value, key=order.order_id, type=type_, cause=message)
