"""The project's own inventory handlers, sending to a topic of the test's own instead of `reservations`."""

from __future__ import annotations

import os

from handlers import inventory
from processor import Database, Message, Output, Reject

inventory.RESULTS = os.environ["TEST_OUTPUT_TOPIC"]

reserve = inventory.reserve
reserve_many = inventory.reserve_many
count = inventory.count


async def look_and_reserve(message: Message[inventory.OrderPlaced], db: Database) -> Output:
    """The same in two steps: read, decide, and queue what follows."""
    order = message.value
    free = await db.fetchval("SELECT on_hand - reserved FROM stock WHERE sku = $1 FOR UPDATE", order.sku)
    if free is None:
        raise Reject(f"order {order.order_id}: no such sku {order.sku!r}")
    value = {"order_id": order.order_id, "sku": order.sku, "quantity": order.quantity}
    if free < order.quantity:
        return Output(inventory.RESULTS, value, key=order.order_id, type="OrderRejected")
    db.write("UPDATE stock SET reserved = reserved + $2 WHERE sku = $1", order.sku, order.quantity)
    db.write(
        "INSERT INTO reservations (order_id, sku, quantity) VALUES ($1, $2, $3)",
        order.order_id,
        order.sku,
        order.quantity,
    )
    return Output(inventory.RESULTS, value | {"left": free - order.quantity}, key=order.order_id, type="OrderReserved")
