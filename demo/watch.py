"""Watches the processor from outside: orders done in Postgres, and answers visible in Kafka."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Mapping
from typing import Any

import asyncpg
from confluent_kafka import Consumer, TopicPartition

from demo.errors import SILENT


class Watch:
    """Counts from outside, with a reader of committed records on a thread, and with SQL."""

    def __init__(self, kafka: Mapping[str, Any], topic: str, starts: Mapping[int, int], database: str) -> None:
        self._consumer = Consumer(
            {
                **kafka,
                "group.id": f"demo-watch-{uuid.uuid4().hex}",  # never joined, never committed to
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 50,
            },
            logger=SILENT,
        )
        self._consumer.assign([TopicPartition(topic, number, offset) for number, offset in starts.items()])
        self._database = database
        self._connection: asyncpg.Connection[asyncpg.Record] | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._read, name="watch", daemon=True)
        self._answers = 0

    async def open(self) -> None:
        self._connection = await asyncpg.connect(self._database)
        self._thread.start()

    async def close(self) -> None:
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()
        self._consumer.close()
        if self._connection is not None:
            await self._connection.close()

    @property
    def in_kafka(self) -> int:
        """The number of answers that any reader of committed records can see now."""
        return self._answers

    async def in_postgres(self) -> int:
        """Return the number of orders whose effect is committed."""
        assert self._connection is not None
        return int(await self._connection.fetchval("SELECT count(*) FROM inbox WHERE status = 'completed'"))

    def _read(self) -> None:
        while not self._stop.is_set():
            self._answers += sum(message.error() is None for message in self._consumer.consume(1000, 0.1))
