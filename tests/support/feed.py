"""Orders, with duplicates among them: all at once, or flowing in the background while things break."""

from __future__ import annotations

import json
import random
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

DUPLICATES = 0.1
TICK_SECONDS = 0.02
FLUSH_SECONDS = 60.0


class Feed:
    """Writes orders to every partition in turn.

    About one in ten, or so many as are asked for, is sent again later, same bytes and same event id at another offset,
    half of those on another partition. The mix is the same in every run.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        partitions: int,
        *,
        skus: int = 5,
        duplicates: float = DUPLICATES,
    ) -> None:
        self._topic = topic
        self._partitions = partitions
        self._skus = skus
        self._duplicates = duplicates
        self._random = random.Random(topic.rpartition("-")[0])
        self._failures: list[str] = []
        self._recent: deque[tuple[int, dict[str, Any]]] = deque(maxlen=200)
        self.orders = 0
        self.records = 0
        # Idempotent, so that a broker's restart does not make this a source of records nobody counted.
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "linger.ms": 5,
                "reconnect.backoff.max.ms": 500,
                "log_level": 0,
            }
        )

    def send(self, count: int) -> None:
        """This many records, and wait until the broker has them."""
        self._produce(count)
        self._flush()

    @contextmanager
    def flowing(self, rate: int) -> Iterator[None]:
        """Records at this rate per second, from a thread of its own, until the block ends."""
        ended = threading.Event()

        def flow() -> None:
            owed = 0.0
            while not ended.wait(TICK_SECONDS):
                owed += rate * TICK_SECONDS
                self._produce(int(owed))
                owed -= int(owed)

        thread = threading.Thread(target=flow, name="feed")
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
        self._flush()

    def _produce(self, count: int) -> None:
        for _ in range(count):
            if self._recent and self._random.random() < self._duplicates:
                partition, order = self._random.choice(self._recent)
                if self._random.random() < 0.5:
                    partition = self._random.randrange(self._partitions)
            else:
                partition, order = self.orders % self._partitions, self._new_order()
                self._recent.append((partition, order))
            self._producer.produce(
                self._topic,
                json.dumps(order).encode(),
                order["order_id"].encode(),
                partition=partition,
                headers={"type": b"OrderPlaced", "message-id": order["event_id"].encode()},
                on_delivery=self._delivered,
            )
            self.records += 1
        self._producer.poll(0)

    def _new_order(self) -> dict[str, Any]:
        number = self.orders
        self.orders += 1
        return {
            "event_id": f"event-{number}",
            "order_id": f"order-{number}",
            "sku": f"sku-{number % self._skus}",
            "quantity": self._random.randint(1, 9),
        }

    def _delivered(self, error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            self._failures.append(error.str())

    def _flush(self) -> None:
        left = self._producer.flush(FLUSH_SECONDS)
        assert left == 0, f"{left} records were not taken by the broker within {FLUSH_SECONDS:g} s"
        assert not self._failures, f"the feed lost {len(self._failures)} records: {self._failures[0]}"
