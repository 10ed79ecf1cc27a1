"""An engine inside the test's own process, so that a test can bring handlers of its own and look at everything."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import inspect
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from confluent_kafka import Consumer, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from processor.engine.engine import Engine
from processor.handling import registry
from processor.settings.load import load
from tests.support import deployments, sending
from tests.support.sending import Place, Sent

__all__ = ["EFFECTS", "SECONDS", "Bench", "Sent", "write_config"]

SECONDS = 40.0
INTERVAL_SECONDS = 0.02


@dataclass
class Bench:
    """One deployment with one input and one output topic."""

    config: Path
    consumer: str
    input: str
    output: str
    database: str
    bootstrap_servers: str
    partitions: int

    def __post_init__(self) -> None:
        self._sent_ids: set[str] = set()
        self.admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})
        self.reader = Consumer({"bootstrap.servers": self.bootstrap_servers, "group.id": self.consumer, "log_level": 0})

    def send(self, records: Iterable[Sent]) -> list[Place]:
        records = list(records)
        for record in records:
            self._sent_ids |= _possible_ids(record)
        return sending.send(self.bootstrap_servers, self.input, records)

    @asynccontextmanager
    async def running(self, engines: int = 1, environ: Mapping[str, str] | None = None) -> AsyncIterator[None]:
        settings = load(self.config, environ or {})
        routes = registry.load(settings)
        started = [Engine(settings, routes) for _ in range(engines)]
        tasks = [asyncio.create_task(engine.run()) for engine in started]
        self.tasks = tasks
        self.engines = started
        try:
            yield
        finally:
            for engine in started:
                engine.stop()
            await asyncio.gather(*tasks)

    async def run_until_done(self, **environ: str) -> None:
        """Process everything that is in the input topic, then stop."""
        async with self.running(environ=environ):
            await self.done()

    async def done(self) -> None:
        """Until the group has committed every input partition to its end."""
        stand: dict[str, dict[int, int]] = {}

        def committed() -> bool:
            try:
                stand["committed"], stand["ends"] = self.committed(), self.ends()
            except KafkaException:
                return False  # a broker that does not know yet who leads was asked; `until` has the deadline
            return all(stand["committed"].get(partition, 0) >= end for partition, end in stand["ends"].items())

        await self.until(lambda: asyncio.to_thread(committed), lambda: f"all input committed: {stand}")

    async def until(self, condition: Callable[[], Awaitable[object] | object], what: str | Callable[[], str]) -> None:
        """Until the condition holds; fails at once if an engine gives up meanwhile."""
        deadline = time.monotonic() + SECONDS
        while True:
            found = condition()
            if await found if inspect.isawaitable(found) else found:
                return
            for task in self.tasks:
                if task.done():
                    task.result()
            if time.monotonic() > deadline:
                raise AssertionError(f"not within {SECONDS:g} s: {what if isinstance(what, str) else what()}")
            await asyncio.sleep(INTERVAL_SECONDS)  # nobody tells a bystander

    async def done_with(self, partition: int) -> None:
        """Until the group has committed this partition to its end, whatever becomes of the others."""

        def committed() -> bool:
            return self.committed().get(partition, 0) >= self.ends()[partition]

        await self.until(lambda: asyncio.to_thread(committed), f"partition {partition} done")

    def committed(self) -> dict[int, int]:
        asked = [TopicPartition(self.input, partition) for partition in range(self.partitions)]
        try:
            return {at.partition: at.offset for at in self.reader.committed(asked, SECONDS) if at.offset >= 0}
        except KafkaException:
            return {}  # the group's coordinator is only just being chosen; `done` has the deadline

    def ends(self) -> dict[int, int]:
        latest = OffsetSpec.latest()  # type: ignore[no-untyped-call]
        asked = {TopicPartition(self.input, partition): latest for partition in range(self.partitions)}
        return {at.partition: answer.result().offset for at, answer in self.admin.list_offsets(asked).items()}

    def outputs(self, topic: str | None = None) -> list[tuple[bytes | None, Any, dict[str, Any]]]:
        """Everything a reader of committed data sees in the output topic, or in this one: key, value, headers."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.bootstrap_servers,
                "group.id": "bench",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "log_level": 0,
            }
        )
        try:
            consumer.assign([TopicPartition(topic or self.output, 0, 0)])
            found: list[tuple[bytes | None, Any, dict[str, Any]]] = []
            while True:
                message = consumer.poll(SECONDS)
                assert message is not None
                if message.error():
                    return found
                raw = message.value()
                value = raw if raw is None or not raw.startswith((b"{", b"[")) else json.loads(raw)
                found.append((message.key(), value, dict(message.headers() or [])))
        finally:
            consumer.close()

    async def rows(self, query: str, *args: Any) -> list[dict[str, Any]]:
        connection = await asyncpg.connect(self.database)
        try:
            return [dict(row) for row in await connection.fetch(query, *args)]
        finally:
            await connection.close()

    async def execute(self, *statements: str) -> None:
        connection = await asyncpg.connect(self.database)
        try:
            for statement in statements:
                await connection.execute(statement)
        finally:
            await connection.close()

    @asynccontextmanager
    async def locked(self, table: str) -> AsyncIterator[None]:
        """Nobody else can read or write the table."""
        connection = await asyncpg.connect(self.database)
        try:
            async with connection.transaction():
                await connection.execute(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE")
                yield
        finally:
            await connection.close()

    async def waiting_for_lock(self) -> None:
        """Until a statement of somebody else waits for a lock."""
        query = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
        self.tasks = []
        await self.until(lambda: self.rows(query), "a statement that waits for a lock")

    async def inbox(self) -> dict[str, dict[str, Any]]:
        """Every row by its message id; that of a plainly completed message is known only by its digest."""
        rows = await self.rows(
            """SELECT inbox.*, status::text AS status, topic, partition, topic_id
               FROM inbox LEFT JOIN ledger USING (partition_id) ORDER BY topic, partition, "offset", received_at"""
        )
        known = {self.key_of(id_): id_ for id_ in self._sent_ids}
        found: dict[str, dict[str, Any]] = {}
        for row in rows:
            place = f"{row['topic']}:{row['topic_id']}:{row['partition']}:{row['offset']}"
            id_ = known.get(row["key"])
            if id_ is None:  # without an id of its own, or one that another message has already
                more = [place, *(f"{id_}~{place}" for id_ in known.values())]
                id_ = next((id_ for id_ in more if self.key_of(id_) == row["key"]), None)
            assert id_ is not None, f"nothing that was sent accounts for this row: {row}"
            assert row["message_id"] in (None, id_), row
            found[id_] = row
        assert len(found) == len(rows)
        return found

    def place(self, offset: int, partition: int = 0) -> str:
        """The name of an input record that has no other."""
        described = self.admin.describe_topics(TopicCollection([self.input]))[self.input].result(SECONDS)
        id_ = str(described.topic_id).translate(str.maketrans("+/", "-_"))
        return f"{self.input}:{id_}:{partition}:{offset}"

    def key_of(self, message_id: str) -> uuid.UUID:
        """The inbox' primary key, made without the processor's help."""
        return uuid.UUID(bytes=hashlib.sha256(f"{self.consumer}:{message_id}".encode()).digest()[:16])

    async def effects(self) -> list[str]:
        """What the test's handlers have written, in order."""
        return [row["what"] for row in await self.rows("SELECT what FROM effects ORDER BY id")]


def _possible_ids(record: Sent) -> set[str]:
    """Whatever in a record a chain of strategies may take for its id; also in the scope of its type."""
    ids = {record.id} if record.id is not None else set()
    value = record.value
    if isinstance(value, bytes):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if isinstance(value, dict):
        ids |= {text for text in value.values() if isinstance(text, str)}
    return ids | {f"{record.type}:{id_}" for id_ in ids}


EFFECTS = "CREATE TABLE effects (id bigint GENERATED ALWAYS AS IDENTITY, what text NOT NULL)"


def write_config(
    path: Path, consumer: str, topic: str, stack: Any, database: str, handlers: dict[str, Any], tables: dict[str, Any]
) -> None:
    kafka: dict[str, Any] = {"bootstrap_servers": stack.bootstrap_servers}
    if tables.get("kafka", {}).get("group_protocol") != "consumer":  # with that one the broker decides
        kafka |= {"session_timeout_ms": 6_000, "consumer": {"heartbeat.interval.ms": 500}}
    base: dict[str, Any] = {
        "handlers": {},
        "message": {"id": ["header:message-id", "offset"]},
        "kafka": kafka,
        "database": {"url": database},
        "run": {"stop_timeout_ms": 15_000},
        **deployments.FAILING,
    }
    merged = deployments.merged(base, tables)
    lines = {name: value for name, value in handlers.items() if isinstance(value, str)}
    merged["handlers"] = lines | {name: value for name, value in handlers.items() if not isinstance(value, str)}
    deployments.write(path, {"consumer": consumer, "topic": topic}, merged)
