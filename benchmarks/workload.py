"""The input: numbered orders, the same for everyone, and what must come out of them."""

from __future__ import annotations

import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import orjson
from confluent_kafka import KafkaError, Message, Producer

from benchmarks.errors import SILENT, BenchError
from benchmarks.sql import SKUS

MOST_AT_ONCE = 5
VALUE_BYTES = 200
ACKNOWLEDGE_SECONDS = 120.0
SKU = "sku-"


class Order(NamedTuple):
    sku: str
    quantity: int


@dataclass(frozen=True, slots=True)
class Feed:
    """A filled topic, every order in it, and the number of records that are no order."""

    topic: str
    orders: dict[str, Order]
    poison: int = 0

    def __len__(self) -> int:
        return len(self.orders)


def orders(count: int, size: int = VALUE_BYTES, skus: int = SKUS) -> Iterator[tuple[str, Order, bytes]]:
    """Id, order and value of each record, the same for every call."""
    dice = random.Random(count)  # noqa: S311 - repeatable on purpose
    bare = len(_value("o-000000", Order("sku-000", 1), uuid.UUID(int=0).hex, ""))
    note = "n" * max(0, size - bare)
    for number in range(count):
        order_id = f"o-{number}"
        order = Order(f"{SKU}{dice.randrange(skus)}", dice.randint(1, MOST_AT_ONCE))
        event_id = uuid.UUID(int=dice.getrandbits(128), version=4).hex
        yield order_id, order, _value(order_id, order, event_id, note)


def fill(
    bootstrap_servers: str,
    topic: str,
    partitions: int,
    count: int,
    size: int = VALUE_BYTES,
    poison_one_in: int = 0,
    keys: int = 0,
) -> Feed:
    """Put the orders into an empty topic, spread evenly; one in `poison_one_in` is spoilt, 0 for none.

    With `keys`, they are orders of so many products, and keyed by those: a product is always in the same partition.
    Otherwise each has its own id as key.
    """
    producer = Producer(
        {
            "bootstrap.servers": bootstrap_servers,
            "enable.idempotence": True,
            "linger.ms": 20,
            "message.max.bytes": 2 * 1024 * 1024,
        },
        logger=SILENT,
    )
    failure: KafkaError | None = None

    def delivered(error: KafkaError | None, _message: Message) -> None:
        nonlocal failure
        failure = failure or error

    known = {}
    for number, (order_id, order, value) in enumerate(orders(count, size, keys or SKUS)):
        if poison_one_in and number % poison_one_in == poison_one_in - 1:
            value = SPOILERS[number // poison_one_in % len(SPOILERS)](value)
        else:
            known[order_id] = order
        key, place = (order.sku, int(order.sku.removeprefix(SKU))) if keys else (order_id, number)
        while True:
            try:
                producer.produce(topic, value, key, place % partitions, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
        if number % 1000 == 0:
            producer.poll(0)
    if producer.flush(ACKNOWLEDGE_SECONDS) or failure is not None:
        raise BenchError(f"the broker did not take the input: {failure.str() if failure else 'no answer in time'}")
    return Feed(topic, known, count - len(known))


def _value(order_id: str, order: Order, event_id: str, note: str) -> bytes:
    return orjson.dumps(
        {
            "event_id": event_id,
            "type": "OrderPlaced",
            "order_id": order_id,
            "sku": order.sku,
            "quantity": order.quantity,
            "note": note,
        }
    )


def _cut_off(value: bytes) -> bytes:
    """No JSON."""
    return value[:-1]


def _without_sku(value: bytes) -> bytes:
    """Refused by a handler that looks."""
    return orjson.dumps(orjson.loads(value) | {"sku": None})


def _without_quantity(value: bytes) -> bytes:
    """Refused by Postgres: the column is NOT NULL."""
    return orjson.dumps(orjson.loads(value) | {"quantity": None})


SPOILERS = (_cut_off, _without_sku, _without_quantity)
