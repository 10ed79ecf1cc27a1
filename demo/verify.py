"""The judge: reads both topics and the database by itself, and compares them.

It shares no code with the processor, and relies on nothing that the processor or the feeder reported: it reads
the orders back from the input topic, the answers as any committed reader does, and counts the rows by SQL.
"""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import asyncpg
from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, Message, TopicPartition

SILENT = logging.Logger("demo.verify", level=logging.CRITICAL + 1)
SECONDS = 60.0
# The most findings that are listed; the numbers cover the rest.
EXAMPLES = 5

Starts = Mapping[int, int]


class UnreadableError(Exception):
    """A server did not deliver what the verdict needs, so there is no verdict."""


class Order(NamedTuple):
    sku: str
    quantity: int


class Answer(NamedTuple):
    type: str
    message_id: str
    order: Order


@dataclass(slots=True)
class Verdict:
    """What was found. Lost and doubled count orders and rows; `wrong` lists everything else that does not add up."""

    records: int = 0
    orders: int = 0
    outputs: int = 0
    reserved: int = 0
    rejected: int = 0
    rows: int = 0
    lost: int = 0
    doubled: int = 0
    wrong: list[str] = field(default_factory=list)

    @property
    def duplicates(self) -> int:
        return self.records - self.orders

    @property
    def ok(self) -> bool:
        return self.lost == 0 and self.doubled == 0 and not self.wrong


async def verify(kafka: Mapping[str, Any], database: str, asked: str, answered: str, starts: Starts) -> Verdict:
    """Compare the orders in topic `asked` with the answers in `answered` from these offsets on, and with the rows."""
    deadline = time.monotonic() + SECONDS
    orders: dict[str, Order] = {}
    verdict = Verdict()
    for message in read(kafka, asked, {}, deadline):
        value = json.loads(message.value() or b"null")
        verdict.records += 1
        orders[value["order_id"]] = Order(value["sku"], value["quantity"])
    answers: dict[str, list[Answer]] = {}
    for message in read(kafka, answered, starts, deadline):
        value = json.loads(message.value() or b"null")
        headers: dict[str, bytes] = dict(message.headers() or ())  # type: ignore[arg-type] # declared as text
        type_, id_ = (headers.get(name, b"").decode() for name in ("type", "message-id"))
        answer = Answer(type_, id_, Order(value["sku"], value["quantity"]))
        answers.setdefault(value["order_id"], []).append(answer)
    try:
        connection = await asyncpg.connect(database)
        try:
            rows = await connection.fetch("SELECT order_id, sku, quantity FROM reservations")
            stock = await connection.fetch("SELECT sku, on_hand, reserved FROM stock")
        finally:
            await connection.close()
    except (OSError, asyncpg.PostgresError) as error:
        raise UnreadableError(f"the database cannot be read: {error}") from error
    held: dict[str, list[Order]] = {}
    for row in rows:
        held.setdefault(row["order_id"], []).append(Order(row["sku"], row["quantity"]))
    levels = {row["sku"]: (row["on_hand"], row["reserved"]) for row in stock}
    return judge(verdict, orders, answers, held, levels)


def judge(
    verdict: Verdict,
    orders: Mapping[str, Order],
    answers: Mapping[str, list[Answer]],
    rows: Mapping[str, list[Order]],
    stock: Mapping[str, tuple[int, int]],
) -> Verdict:
    """Check that every order has one answer, and a row if and only if it is reserved, and that stock adds up.

    No order may be rejected for a sku that had enough stock to the end.
    """
    types = Counter(answer.type for all_ in answers.values() for answer in all_)
    verdict.orders = len(orders)
    verdict.outputs = types.total()
    verdict.reserved = types["OrderReserved"]
    verdict.rejected = types["OrderRejected"]
    verdict.rows = sum(map(len, rows.values()))
    found: list[str] = []
    for order_id, order in orders.items():
        given = answers.get(order_id, [])
        kept = rows.get(order_id, [])
        reserved = any(answer.type == "OrderReserved" for answer in given)
        verdict.lost += (not given) + (reserved and not kept)
        verdict.doubled += max(0, len(given) - 1) + max(0, len(kept) - 1)
        if given and kept and not reserved:
            found.append(f"order {order_id} was rejected and has a row")
        if any(answer.order != order for answer in given) or any(row != order for row in kept):
            found.append(f"order {order_id} came out with another sku or quantity")
        on_hand, taken = stock.get(order.sku, (0, 0))
        if given and not reserved and taken + order.quantity <= on_hand:
            found.append(f"order {order_id} was rejected although {order.sku} had stock to the end")
    found += [f"order {order_id} was answered and never placed" for order_id in answers.keys() - orders.keys()]
    found += [f"order {order_id} has a row and was never placed" for order_id in rows.keys() - orders.keys()]
    found += [f"an answer has type {type_!r}" for type_ in types.keys() - {"OrderReserved", "OrderRejected"}]
    ids = Counter(answer.message_id for all_ in answers.values() for answer in all_)
    found += [f"message-id {id_} is on {times} answers" for id_, times in ids.items() if times > 1 or not id_]
    sums = Counter[str]()
    for kept in rows.values():
        for row in kept:
            sums[row.sku] += row.quantity
    for sku, (on_hand, reserved_quantity) in stock.items():
        if reserved_quantity != sums[sku]:
            found.append(f"{sku} has {reserved_quantity} reserved, its rows add up to {sums[sku]}")
        if reserved_quantity > on_hand:
            found.append(f"{sku} is oversold: {reserved_quantity} of {on_hand}")
    verdict.wrong = found[:EXAMPLES]
    if len(found) > EXAMPLES:
        verdict.wrong.append(f"and {len(found) - EXAMPLES} more")
    return verdict


def read(kafka: Mapping[str, Any], topic: str, starts: Starts, deadline: float) -> Iterator[Message]:
    """Yield every committed record of a topic up to its current end."""
    consumer = Consumer(
        {
            **kafka,
            "group.id": f"demo-verify-{uuid.uuid4().hex}",  # never joined, never committed to
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
        },
        logger=SILENT,
    )
    try:
        found = consumer.list_topics(topic, timeout=10).topics[topic]
        if found.error is not None:  # otherwise it would look like an empty topic
            raise UnreadableError(f"topic {topic}: {found.error.str()}")
        partitions = found.partitions
        consumer.assign([TopicPartition(topic, number, starts.get(number, OFFSET_BEGINNING)) for number in partitions])
        unfinished = set(partitions)
        while unfinished:
            if time.monotonic() > deadline:
                raise UnreadableError(f"topic {topic} could not be read to its end within {SECONDS:.0f} s")
            for message in consumer.consume(1000, 0.2):
                error = message.error()
                if error is None:
                    yield message
                elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                    unfinished.discard(message.partition())
                elif not error.retriable():
                    raise UnreadableError(f"topic {topic}: {error.str()}")
    finally:
        consumer.close()
