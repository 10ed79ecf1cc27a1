"""How a consumer is: what Postgres and Kafka say about it, whether a processor runs or not. Read-only.

Either server may be down: then its part is missing, and the report says so in words.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, TypeVar

from processor.errors import ProcessorError, SetupError
from processor.kafka.inspection import Inspection, Refused
from processor.kafka.logs import Logs
from processor.messages.message import Partition
from processor.operations import judging
from processor.operations.judging import InDatabase, InKafka, PartitionStatus
from processor.postgres import connections, pruning, replays, retention, standing

if TYPE_CHECKING:
    from processor.postgres.pruning import Latest
    from processor.postgres.replays import UnderWay
    from processor.postgres.retention import Watermark
    from processor.postgres.standing import Estimate, Standing
    from processor.settings.schema import Settings

T = TypeVar("T")

STATEMENT_SECONDS = 10.0
SLOW = "are there that many failed or parked messages? `processor dlq` redrives or discards them"


@dataclass(frozen=True, slots=True)
class StatusRows:
    """Messages of one status in the inbox."""

    status: str
    rows: int
    oldest: datetime | None


@dataclass(frozen=True, slots=True)
class Forgetting:
    """How far messages have been forgotten."""

    span: timedelta | None  # how long they are remembered; None for ever
    round: Latest | None  # through the inbox; None if there never was one
    watermarks: dict[Partition, Watermark]


@dataclass(slots=True)
class Report:
    consumer: str
    at: datetime
    partitions: list[PartitionStatus]
    inbox: list[StatusRows] = field(default_factory=list)  # what is not completed
    completed: Estimate | None = None  # of all consumers that share the inbox, by Postgres' statistics
    forgetting: Forgetting | None = None
    replays: list[UnderWay] = field(default_factory=list)  # those that have not ended
    slots: list[int] = field(default_factory=list)  # leased by living processes
    members: int | None = None  # of the group, as the brokers count them
    postgres: str | None = None  # why Postgres could not be asked
    kafka: str | None = None  # why Kafka could not be asked

    @property
    def lag(self) -> int | None:
        """In all; None if it is not known of some partition."""
        lags = [one.lag for one in self.partitions if one.lag is not None]
        return sum(lags) if lags and len(lags) == len(self.partitions) else None

    @property
    def troubled(self) -> list[PartitionStatus]:
        return [one for one in self.partitions if one.why]


@dataclass(frozen=True, slots=True)
class Target:
    """What a script waits for."""

    text: str
    lag: int | None = None  # below this

    @classmethod
    def parse(cls, text: str) -> Target | None:
        """`ready`, `drained` or `lag<N`; None for anything else."""
        if text in ("ready", "drained"):
            return cls(text)
        below = re.fullmatch(r"lag<(\d+)", text.replace(" ", ""))
        return cls(text, int(below[1])) if below else None

    def missing(self, report: Report) -> list[str]:
        """Why it is not reached; nothing if it is."""
        found = [down for down in (report.postgres, report.kafka) if down]
        if found:
            return found
        if not report.partitions:
            return ["no topic of this consumer exists"]
        if self.lag is not None:
            lag = report.lag
            return [] if lag is not None and lag < self.lag else [f"lag {'unknown' if lag is None else lag}"]
        if self.text == "ready":
            return [
                f"{one.name} {one.state}"
                for one in report.partitions
                if one.state not in (judging.RUNNING, judging.RETRY)
            ]
        return [
            f"{one.name} lag {'unknown' if one.lag is None else one.lag}"
            + (f", {one.unsent} batches wait for Kafka" if one.unsent else "")
            for one in report.partitions
            if one.lag != 0 or one.unsent
        ]

    def hopeless(self, report: Report) -> list[PartitionStatus]:
        """Partitions without which it cannot be reached, and which wait for an operator."""
        return [one for one in report.partitions if one.state == judging.HALTED and (one.lag or self.text == "ready")]


class Observer:
    """Looks again and again, with the same clients. Close it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._inspection: Inspection | None = None
        self._logs: Logs | None = None

    async def look(self) -> Report:
        database, no_database = await _or_why_not(self._in_database)
        standings = {Partition(one.topic, one.partition): one for one in (database.standings if database else ())}
        kafka, no_kafka = await _or_why_not(lambda: asyncio.to_thread(self._in_kafka, standings))
        now = datetime.now(UTC)
        partitions = judging.judged(database, kafka, self._settings.kafka.start, now)
        report = Report(self._settings.consumer, now, partitions, postgres=no_database, kafka=no_kafka)
        if database is not None:
            report.inbox = [StatusRows(*one) for one in judging.by_status(database.rows)]
            report.completed, report.slots, report.replays = database.estimate, database.slots, database.replays
            report.forgetting = Forgetting(self._settings.retention.span, database.round, database.watermarks)
        if kafka is not None:
            report.members = kafka.members
        return report

    def close(self) -> None:
        if self._logs is not None:
            self._logs.close()

    async def _in_database(self) -> InDatabase:
        consumer = self._settings.consumer
        async with connections.read_only(self._settings, STATEMENT_SECONDS, SLOW) as db:
            standings = await standing.partitions(db, consumer)
            ids = [id_ for one in standings for id_ in (one.partition_id, *one.former)]
            return InDatabase(
                standings,
                await standing.troubles(db, consumer),
                await standing.slots(db, consumer),
                await standing.unfinished(db, ids),
                await standing.estimate(db),
                await retention.watermarks(db, consumer),
                await pruning.latest(db, consumer),
                await replays.under_way(db, consumer),
            )

    def _in_kafka(self, standings: dict[Partition, Standing]) -> InKafka:
        """Blocks; each question within its deadline, and only one if no broker answers."""
        settings = self._settings
        try:
            self._inspection = self._inspection or Inspection(settings.kafka)
            self._inspection.brokers()
        except Refused as error:
            self._inspection = None  # it would remember this trouble
            raise SetupError(f"the brokers at {settings.kafka.bootstrap_servers} do not answer: {error}") from None
        self._logs = self._logs or Logs(settings.kafka, settings.consumer)
        topics = self._logs.topics({*settings.topics, *(at.topic for at in standings)})
        found = InKafka({name: id_ for name, (id_, _) in topics.items()})
        found.partitions = [Partition(name, number) for name, (_, numbers) in topics.items() for number in numbers]
        found.ends, found.unknown = self._logs.ends(found.partitions)
        found.committed = self._logs.committed(found.partitions)
        positions = {}
        for at, end in found.ends.items():
            position = judging.start_of(standings.get(at), found.committed.get(at), end, settings.kafka.start)
            if position is not None and position < end.stable:
                positions[at] = max(position, end.start)
        found.heads = self._logs.heads(positions)
        try:
            group = self._inspection.group(settings.consumer)
            found.members = group.number if group else 0
        except Refused:
            found.members = None
        return found


async def _or_why_not(ask: Callable[[], Awaitable[T]]) -> tuple[T | None, str | None]:
    """The answer, or why there is none."""
    try:
        return await ask(), None
    except ProcessorError as error:
        return None, str(error)
