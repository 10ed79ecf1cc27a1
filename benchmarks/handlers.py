"""The work as handlers of the processor: for a batch, and for one message in each way to write rows."""

from __future__ import annotations

from typing import Any

from benchmarks import sql
from benchmarks.job import Job
from processor import Database, Message, Messages, Output, Outputs, Reject

Order = dict[str, Any]

OUTPUT = Job.read().output


async def batch(messages: Messages[Order], db: Database) -> Outputs:
    ids, skus, quantities = columns(messages.values)
    db.write(sql.INSERT_MANY, ids, skus, quantities)
    db.write(sql.UPDATE_MANY, skus, quantities)
    answers = [
        {"order_id": id_, "sku": sku, "quantity": quantity}
        for id_, sku, quantity in zip(ids, skus, quantities, strict=True)
    ]
    return Outputs(OUTPUT, answers, messages.keys)


async def objects(messages: list[Message[Order]], db: Database) -> list[Output]:
    ids, skus, quantities = columns([message.value for message in messages])
    db.write(sql.INSERT_MANY, ids, skus, quantities)
    db.write(sql.UPDATE_MANY, skus, quantities)
    return [Output(OUTPUT, answer(message.value), message.key, cause=message) for message in messages]


def columns(orders: list[Order]) -> tuple[list[str], list[str], list[int]]:
    return (
        [order["order_id"] for order in orders],
        [order["sku"] for order in orders],
        [order["quantity"] for order in orders],
    )


async def collect(message: Message[Order], db: Database) -> Output:
    order = message.value
    db.collect(sql.INSERT_MANY, order["order_id"], order["sku"], order["quantity"])
    db.collect(sql.UPDATE_MANY, order["sku"], order["quantity"])
    return Output(OUTPUT, answer(order), message.key)


async def write(message: Message[Order], db: Database) -> Output:
    order = message.value
    db.write(sql.INSERT_ONE, order["order_id"], order["sku"], order["quantity"])
    db.write(sql.UPDATE_ONE, order["sku"], order["quantity"])
    return Output(OUTPUT, answer(order), message.key)


async def write_or_reject(message: Message[Order], db: Database) -> Output:
    if message.value["sku"] is None:
        raise Reject("an order of nothing")
    return await write(message, db)


async def execute(message: Message[Order], db: Database) -> Output:
    order = message.value
    await db.execute(sql.INSERT_ONE, order["order_id"], order["sku"], order["quantity"])
    await db.execute(sql.UPDATE_ONE, order["sku"], order["quantity"])
    return Output(OUTPUT, answer(order), message.key)


def answer(order: Order) -> Order:
    return {"order_id": order["order_id"], "sku": order["sku"], "quantity": order["quantity"]}
