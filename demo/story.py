"""The scenes in order: feed orders, kill the processor at the worst moments, restart it, and let the judge compare.

Everything is made for this run (a database, topics, a consumer group) and removed after it, even if it fails.
"""

from __future__ import annotations

import asyncio
import math
import random
import signal
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec  # type: ignore[attr-defined] # exported, not declared

from demo import orders, verify
from demo.errors import SILENT, DemoError
from demo.service import Service
from demo.summary import BETWEEN, RANDOM, Kill, Summary
from demo.watch import Watch

if TYPE_CHECKING:
    from demo.show import Show
    from processor.stack import Stack

ANSWERS = "reservations"  # where handlers.inventory sends them
ORDER_PARTITIONS = 6
ANSWER_PARTITIONS = 3
BATCH = 500
FEED_PER_SECOND = 2500
TICK_SECONDS = 0.1
# Readers need this long to see the last transaction before the gap between the two systems is counted.
SETTLE_SECONDS = 0.5
STANDSTILL_SECONDS = 45.0
KAFKA_SECONDS = 15.0

# What a broker answers about a topic that was just created.
_NOT_YET = (
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.UNKNOWN_TOPIC_OR_PART,
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
)


@dataclass(slots=True)
class Stage:
    """What was made for this run."""

    run: str
    kafka: dict[str, Any]
    admin: AdminClient
    group: Consumer  # asks about the processor's group, never joins it
    database: str
    topic: str
    dead_letters: str  # must exist, and stays empty: every order can be processed
    starts: dict[int, int]  # where our answers begin in a topic that other runs may use too
    service: Service
    made: list[str] = field(default_factory=list)  # topics, besides our own, that this run has created


async def play(stack: Stack, show: Show, wanted: int, kills: int, *, keep: bool) -> Summary:
    dice = random.Random()  # noqa: S311 - for a story, not for secrets
    async with _staged(stack, keep=keep) as stage:
        started = time.monotonic()
        feed = orders.records(wanted, stage.run, ORDER_PARTITIONS, dice)
        watch = Watch(stage.kafka, ANSWERS, stage.starts, stage.database)
        try:
            await watch.open()
            killed = await _Performance(stage, show, watch, feed, wanted, kills, dice).play()
        finally:
            await watch.close()
        show.say("a separate reader, sharing no code with the processor, compares both topics and the tables")
        verdict = await verify.verify(stage.kafka, stage.database, stage.topic, ANSWERS, stage.starts)
        return Summary(verdict, killed, time.monotonic() - started)


class _Performance:
    def __init__(
        self,
        stage: Stage,
        show: Show,
        watch: Watch,
        feed: list[orders.Sent],
        wanted: int,
        kills: int,
        dice: random.Random,
    ) -> None:
        self._stage = stage
        self._service = stage.service
        self._show = show
        self._watch = watch
        self._feed = feed
        self._wanted = wanted
        self._fed = 0
        self._killed: list[Kill] = []
        # The first kill counts batches, the others wait for this many answers to be visible.
        self._batches = max(1, math.ceil(wanted / (kills + 1) / BATCH)) if kills else 0
        self._thresholds = [int(wanted * (n + dice.uniform(-0.2, 0.2)) / (kills + 1)) for n in range(2, kills + 1)]
        self._seen = (0, 0, 0)  # records fed, orders done in Postgres, answers visible in Kafka
        self._last_change = time.monotonic()

    async def play(self) -> list[Kill]:
        service, show = self._service, self._show
        failpoint = f"after_postgres_commit=kill@{self._batches}" if self._batches else ""
        await service.start(failpoint)
        show.say(f"`processor run` started, pid {service.pid}")
        if failpoint:
            show.say(f"it will be killed in batch {self._batches}: after Postgres has committed, before Kafka has")
        seconds = len(self._feed) / FEED_PER_SECOND
        show.begin(len(self._feed), self._wanted)
        feeding = asyncio.create_task(
            orders.feed(self._stage.kafka, self._stage.topic, self._feed, seconds, self._count_fed)
        )
        try:
            while self._thresholds or not feeding.done() or not await self._caught_up():
                await asyncio.sleep(TICK_SECONDS)
                if feeding.done():
                    feeding.result()
                await self._look()
        finally:
            feeding.cancel()
            await asyncio.wait({feeding})
        await self._report()
        show.end()
        code = await service.stop()
        if code != 0:
            raise DemoError(f"the processor stopped with exit code {code}: {service.last_line()}")
        show.say("every record is processed; SIGTERM: the processor stopped in order, exit code 0")
        return self._killed

    def _count_fed(self, acknowledged: int) -> None:
        self._fed = acknowledged

    async def _look(self) -> None:
        """Report the progress; kill the processor if it is time, and start it again if it is dead."""
        await self._report()
        code = self._service.ended()
        if code is None:
            if self._killed:
                await self._kill_if_due()
            if time.monotonic() - self._last_change > STANDSTILL_SECONDS:
                fed, done, visible = self._seen
                raise DemoError(
                    f"no progress for {STANDSTILL_SECONDS:.0f} s, with {fed:,} records fed, {done:,} orders done in"
                    f" Postgres, {visible:,} answers visible in Kafka; it last said: {self._service.last_line()}"
                )
        elif code == -signal.SIGKILL and not self._killed:
            await self._restart(BETWEEN)
        else:
            raise DemoError(f"the processor ended with exit code {code}: {self._service.last_line()}")

    async def _report(self) -> None:
        seen = (self._fed, await self._watch.in_postgres(), self._watch.in_kafka)
        if seen != self._seen:
            self._seen = seen
            self._last_change = time.monotonic()
        self._show.progress(*self._seen, len(self._killed))

    async def _kill_if_due(self) -> None:
        if self._thresholds and self._watch.in_kafka >= self._thresholds[0]:
            self._thresholds.pop(0)
            await self._service.kill()
            await self._restart(RANDOM)

    async def _restart(self, where: str) -> None:
        """Show what the dead process left behind, start the next one, and report how it recovered."""
        died = time.monotonic()
        pid = self._service.pid
        await asyncio.sleep(SETTLE_SECONDS)
        await self._report()
        _, in_postgres, in_kafka = self._seen
        kill = Kill(where, in_postgres, in_kafka)
        self._killed.append(kill)
        left = (
            f"{kill.unsent:,} orders are done in Postgres, and Kafka has no answer to them"
            if kill.unsent
            else "its unfinished batch is visible in neither system"
        )
        self._show.say(f"SIGKILL {where}: pid {pid} is dead; {left}", style="bold red")
        await self._service.start()
        self._show.say(f"started again, pid {self._service.pid}; the group notices the death after 3 s")
        while not (found := self._recovered()):
            if self._service.ended() is not None:
                raise DemoError(f"the processor did not come back: {self._service.last_line()}")
            if time.monotonic() - died > STANDSTILL_SECONDS:
                raise DemoError(f"not back after {STANDSTILL_SECONDS:.0f} s: {self._service.last_line()}")
            await asyncio.sleep(TICK_SECONDS)
            await self._report()
        kill.resent = sum(event["outputs"] for event in found if event["event"] == "stored_outputs_sent")
        kill.seconds_away = round(time.monotonic() - died, 1)
        sent = (
            f"the {kill.resent:,} stored answers are sent, no record was read again, no handler ran"
            if kill.resent
            else "nothing was owed to Kafka, work goes on"
        )
        self._show.say(f"back after {kill.seconds_away} s: {sent}", style="green")

    def _recovered(self) -> list[dict[str, Any]]:
        """Return the new process's events once it has every partition back; empty before."""
        found = [event for event in self._service.events() if event.get("event")]
        ready = {event["partition"] for event in found if event["event"] == "partition_ready"}
        return found if len(ready) == ORDER_PARTITIONS else []

    async def _caught_up(self) -> bool:
        """Return whether the group's committed offsets are at the end of every partition."""
        return await asyncio.to_thread(_is_caught_up, self._stage)


def _is_caught_up(stage: Stage) -> bool:
    partitions = [TopicPartition(stage.topic, number) for number in range(ORDER_PARTITIONS)]
    try:
        committed = {at.partition: at.offset for at in stage.group.committed(partitions, KAFKA_SECONDS)}
    except KafkaException:
        return False
    return committed == _ends(stage.admin, stage.topic)


@asynccontextmanager
async def _staged(stack: Stack, *, keep: bool) -> AsyncIterator[Stage]:
    run = f"demo-{uuid.uuid4().hex[:8]}"
    topic = f"{run}-orders"
    kafka: dict[str, Any] = {"bootstrap.servers": stack.bootstrap_servers, **stack.client_settings}
    database = urlunsplit(urlsplit(stack.postgres_url)._replace(path=f"/{run}"))
    environment = {
        **stack.environment(),
        "PROCESSOR_CONSUMER": run,
        "PROCESSOR_TOPIC": topic,
        "PROCESSOR_DATABASE__URL": database,
        "PROCESSOR_BATCH__MAX_MESSAGES": str(BATCH),
        # The group notices a dead process after 3 s instead of 10, which would be long to watch.
        "PROCESSOR_KAFKA__SESSION_TIMEOUT_MS": "3000",
        "PROCESSOR_KAFKA__CONSUMER__HEARTBEAT_INTERVAL_MS": "500",
    }
    service = Service(environment, stack.directory / "logs" / "demo-processor.log")
    group = Consumer({**kafka, "group.id": run, "enable.auto.commit": False}, logger=SILENT)
    admin = AdminClient(kafka, logger=SILENT)
    stage = Stage(run, kafka, admin, group, database, topic, f"{topic}.{run}.dlq", {}, service)
    try:
        await _server(stack, f'CREATE DATABASE "{run}"')
        await asyncio.to_thread(_make_topics, stage)
        await service.migrate()
        await _fill_stock(database)
        yield stage
    finally:
        await asyncio.shield(_clean_up(stack, stage, keep=keep))


async def _clean_up(stack: Stack, stage: Stage, *, keep: bool) -> None:
    await stage.service.close()
    stage.group.close()
    if keep:
        return
    # If a server is gone there is nothing to remove, and its error must not replace the one that brought us here.
    with suppress(OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError):
        await _server(stack, f'DROP DATABASE IF EXISTS "{stage.run}" WITH (FORCE)')
    with suppress(KafkaException):
        await asyncio.to_thread(_remove_topics, stage)


async def _server(stack: Stack, statement: str) -> None:
    connection = await asyncpg.connect(stack.postgres_url)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


async def _fill_stock(database: str) -> None:
    """Load the merchant's first stock, before any order."""
    connection = await asyncpg.connect(database)
    try:
        await connection.executemany("INSERT INTO stock (sku, on_hand) VALUES ($1, $2)", orders.stock())
    finally:
        await connection.close()


def _make_topics(stage: Stage) -> None:
    wanted = [
        NewTopic(stage.topic, ORDER_PARTITIONS),
        NewTopic(stage.dead_letters, 1),
        NewTopic(ANSWERS, ANSWER_PARTITIONS),
    ]
    for name, future in stage.admin.create_topics(wanted, operation_timeout=KAFKA_SECONDS).items():
        try:
            future.result()
            if name == ANSWERS:
                stage.made.append(name)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
    stage.starts = _ends(stage.admin, ANSWERS)


def _ends(admin: AdminClient, topic: str) -> dict[int, int]:
    deadline = time.monotonic() + KAFKA_SECONDS
    while True:
        try:
            found = admin.list_topics(topic, timeout=KAFKA_SECONDS).topics[topic]
            if found.error is not None:  # then it has no partitions, which does not mean that the topic has none
                raise KafkaException(found.error)
            futures = admin.list_offsets(
                {TopicPartition(topic, number): OffsetSpec.latest() for number in found.partitions},  # type: ignore[no-untyped-call]
                request_timeout=KAFKA_SECONDS,
            )
            return {at.partition: future.result().offset for at, future in futures.items()}
        except KafkaException as error:  # partitions of a new topic have no leader for a moment
            if error.args[0].code() not in _NOT_YET or time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def _remove_topics(stage: Stage) -> None:
    """Remove the run's topics. The broker then forgets the group, which has no members, by itself."""
    ours = [stage.topic, stage.dead_letters, *stage.made]
    for future in stage.admin.delete_topics(ours, operation_timeout=KAFKA_SECONDS).values():
        future.exception()  # ignored: a topic that was never made need not be deleted
