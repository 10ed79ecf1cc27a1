"""A steady stream of orders, and when each of them and its output was seen."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from confluent_kafka import Producer

from benchmarks.errors import SILENT, BenchError
from benchmarks.job import Job
from benchmarks.site import PARTITIONS, Site
from benchmarks.workload import Order

ANSWER_SECONDS = 60.0
# Between two bursts: sending thousands a second one by one would take a core.
PAUSE_SECONDS = 0.002


class Stream:
    """Sends orders to a job's input and listens to its output, as any committed reader."""

    def __init__(self, site: Site, job: Job, partitions: int = PARTITIONS) -> None:
        self._job = job
        self._partitions = partitions  # of the input
        self._producer = Producer(
            {"bootstrap.servers": site.cluster.bootstrap_servers, "linger.ms": 0, "acks": "all"}, logger=SILENT
        )
        self._reader = site.cluster.reader(job.output, PARTITIONS, fetch_wait_max_ms=500)
        self._arrived = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="listen", daemon=True)
        self.orders: dict[str, Order] = {}
        self.sent: dict[str, float] = {}
        self.seen: dict[str, float] = {}
        self.places: dict[str, int] = {}  # the partition of each
        self._ids: list[str] = []
        self._answered = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._reader.close()

    def send(self, order_id: str, order: Order, value: bytes) -> None:
        partition = len(self.orders) % self._partitions
        self.orders[order_id] = order
        self.places[order_id] = partition
        self._ids.append(order_id)
        self.sent[order_id] = time.perf_counter()
        self._producer.produce(self._job.input, value, order_id, partition)
        self._producer.poll(0)

    def pace(self, orders: Iterable[tuple[str, Order, bytes]], per_second: float) -> None:
        started = time.perf_counter()
        for number, order in enumerate(orders):
            wait = started + number / per_second - time.perf_counter()
            if wait > 0:
                time.sleep(wait)
            self.send(*order)

    def wait(self, seconds: float = ANSWER_SECONDS) -> None:
        """Wait until every order that was sent has its output."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: len(self.seen) >= len(self.sent), seconds):
                raise BenchError(f"{len(self.sent) - len(self.seen)} of {len(self.sent)} orders have no output")

    def answered(self) -> int:
        """The number of orders before the first one without output."""
        while self._answered < len(self._ids) and self._ids[self._answered] in self.seen:
            self._answered += 1
        return self._answered

    def delays(self, order_ids: Iterable[str]) -> list[float]:
        """Milliseconds from sending to seeing."""
        return [(self.seen[id_] - self.sent[id_]) * 1000 for id_ in order_ids]

    def _listen(self) -> None:
        while not self._stop.is_set():
            # `consume` alone would wait until it has as many as requested.
            first = self._reader.poll(0.1)
            if first is None:
                continue
            messages = [first, *self._reader.consume(1000, 0)]
            now = time.perf_counter()
            with self._arrived:
                for message in messages:
                    if message.error() is None:
                        self.seen.setdefault((message.key() or b"").decode(), now)
                self._arrived.notify_all()


class Pacer:
    """Sends orders at a steady rate from a thread of its own, until the block ends."""

    def __init__(self, stream: Stream, orders: Iterator[tuple[str, Order, bytes]], per_second: float) -> None:
        self._stream = stream
        self._orders = orders
        self._per_second = per_second
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._send, name="pace", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _send(self) -> None:
        started = time.perf_counter()
        number = 0
        while not self._stop.wait(PAUSE_SECONDS):
            due = int((time.perf_counter() - started) * self._per_second)
            for order in itertools.islice(self._orders, due - number):
                self._stream.send(*order)
            number = due
