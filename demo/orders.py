"""The shop's orders, with repeats as an at-least-once producer sends them, and the stock that they draw on."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from demo.errors import SILENT, DemoError

SKUS = 200
# Every 20th sku runs out, so that rejections are part of the story.
SCARCE_EVERY = 20
SCARCE_STOCK = 50
PLENTY = 1_000_000
MOST_AT_ONCE = 5

DUPLICATES = 0.05
# A repeat comes at once (in the same batch), or up to this many orders later (in another batch, maybe after a crash).
LATEST_REPEAT = 3000

CHUNK = 100
ANYWHERE = -1  # the key decides the partition


@dataclass(frozen=True, slots=True)
class Sent:
    """One record to send. A repeat may go to another partition than the first, as after adding partitions."""

    key: str
    value: bytes
    partition: int = ANYWHERE


def stock() -> list[tuple[str, int]]:
    """Return each sku with its quantity on hand."""
    return [(f"sku-{n:03}", SCARCE_STOCK if n % SCARCE_EVERY == 0 else PLENTY) for n in range(SKUS)]


def records(orders: int, run: str, partitions: int, dice: random.Random) -> list[Sent]:
    """Return every order at least once, in the sequence of sending."""
    repeats: dict[int, list[Sent]] = {}
    feed: list[Sent] = []
    for number in range(orders):
        order_id = f"{run}-{number:07}"
        order = {
            "event_id": f"placed-{order_id}",
            "type": "OrderPlaced",
            "order_id": order_id,
            "sku": f"sku-{dice.randrange(SKUS):03}",
            "quantity": dice.randint(1, MOST_AT_ONCE),
        }
        sent = Sent(order_id, json.dumps(order).encode())
        feed.append(sent)
        if dice.random() < DUPLICATES:
            due = number + dice.choice((0, dice.randint(1, LATEST_REPEAT)))
            elsewhere = dice.randrange(partitions) if dice.random() < 1 / 3 else ANYWHERE
            repeats.setdefault(due, []).append(Sent(sent.key, sent.value, elsewhere))
        feed += repeats.pop(number, ())
    for late in sorted(repeats):
        feed += repeats[late]
    return feed


async def feed(
    kafka: Mapping[str, Any],
    topic: str,
    feed: Sequence[Sent],
    seconds: float,
    report: Callable[[int], None],
) -> None:
    """Send the records, spread over this many seconds; `report` gets the number that the broker has acknowledged."""
    producer = Producer({**kafka, "enable.idempotence": True, "linger.ms": 5}, logger=SILENT)
    acknowledged = 0
    failure: KafkaError | None = None

    def delivered(error: KafkaError | None, _message: Message) -> None:
        nonlocal acknowledged, failure
        failure = failure or error
        acknowledged += error is None

    loop = asyncio.get_running_loop()
    started = loop.time()
    try:
        for first in range(0, len(feed), CHUNK):
            for one in feed[first : first + CHUNK]:
                producer.produce(topic, one.value, one.key, one.partition, on_delivery=delivered)
            producer.poll(0)
            report(acknowledged)
            await asyncio.sleep(max(0.0, started + seconds * first / len(feed) - loop.time()))
        while acknowledged < len(feed):
            producer.poll(0)
            if failure is not None:
                raise DemoError(f"the broker did not take an order: {failure.str()}")
            report(acknowledged)
            await asyncio.sleep(0.02)
    finally:
        producer.purge()
    report(acknowledged)
