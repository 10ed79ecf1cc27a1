"""The same work where orders may be keyed by their product: the answers have the order's id as key all the same."""

from __future__ import annotations

from benchmarks import sql
from benchmarks.handlers import OUTPUT, Order, answer, columns
from processor import Database, Message, Messages, Output, Outputs, Reject


async def batch(messages: Messages[Order], db: Database) -> Outputs:
    ids, skus, quantities = columns(messages.values)
    db.write(sql.INSERT_MANY, ids, skus, quantities)
    db.write(sql.UPDATE_MANY, skus, quantities)
    return Outputs(OUTPUT, list(map(answer, messages.values)), ids)


async def collect(message: Message[Order], db: Database) -> Output:
    order = message.value
    db.collect(sql.INSERT_MANY, order["order_id"], order["sku"], order["quantity"])
    db.collect(sql.UPDATE_MANY, order["sku"], order["quantity"])
    return Output(OUTPUT, answer(order), order["order_id"])


async def write(message: Message[Order], db: Database) -> Output:
    order = message.value
    db.write(sql.INSERT_ONE, order["order_id"], order["sku"], order["quantity"])
    db.write(sql.UPDATE_ONE, order["sku"], order["quantity"])
    return Output(OUTPUT, answer(order), order["order_id"])


async def execute(message: Message[Order], db: Database) -> Output:
    order = message.value
    await db.execute(sql.INSERT_ONE, order["order_id"], order["sku"], order["quantity"])
    await db.execute(sql.UPDATE_ONE, order["sku"], order["quantity"])
    return Output(OUTPUT, answer(order), order["order_id"])


async def read(message: Message[Order], db: Database) -> Output:
    """Reads, decides, and queues one write."""
    order = message.value
    stock = await db.fetchrow(sql.LOOK_AT_ONE, order["sku"])
    if stock is None or stock["free"] < order["quantity"]:
        raise Reject("not enough of it")
    db.write(sql.TAKE_ONE, order["order_id"], order["sku"], order["quantity"])
    return Output(OUTPUT, answer(order), order["order_id"])
