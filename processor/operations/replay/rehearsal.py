"""A dry run: handlers run on the tables of today, all that they write is rolled back, and their outputs are compared.

Nothing is written to Postgres or Kafka: there are no ledger rows, no claims, no transaction that is committed. Hence it
has no name, and one that is interrupted starts again at the beginning. (What a rollback does not take back, such as the
next number of a sequence, moves on.)
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from processor.engine.failing.attribute import attribute
from processor.engine.failing.classify import Judge, Kind, backoff, failure_of
from processor.engine.failing.outcomes import Again, Culprit, Unattributed
from processor.errors import SetupError, text_of
from processor.handling.errors import HandlerError
from processor.handling.run import BatchRun
from processor.kafka.published import scan
from processor.kafka.reader import PartitionReader
from processor.messages.batch import Batch
from processor.messages.decode import Decoder
from processor.messages.message import Partition
from processor.messages.record import Reading
from processor.observe.readiness import Readiness
from processor.observe.stalls import Stalls
from processor.operations.replay import ranges
from processor.operations.replay.comparison import Comparer, Comparison
from processor.operations.replay.run import Moment
from processor.operations.replay.selection import Selection
from processor.postgres import sqlstates
from processor.postgres.claims import Claims
from processor.postgres.recall import known
from processor.postgres.session import Session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from processor.handling.registry import Routes
    from processor.kafka.cluster import Cluster
    from processor.messages.failure import Failure
    from processor.messages.outputs import Outgoing
    from processor.messages.record import Record
    from processor.operations.replay.plan import Plan
    from processor.operations.replay.run import Watch
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

# Failures that are shown; all are counted.
SHOWN = 100
# Clocks of producers and brokers differ: outputs are looked for from this long before the first record on.
CLOCKS_MS = 3_600_000


@dataclass(slots=True)
class Report:
    processed: int = 0
    skipped: int = 0
    failed: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    comparison: Comparison | None = None
    interrupted: bool = False


async def rehearse(
    settings: Settings, routes: Routes, cluster: Cluster, plan: Plan, stop: asyncio.Event, watch: Watch
) -> Report:
    """Run it, and compare; raise SetupError where something that handlers need is down."""
    settings = settings.model_copy(
        update={
            "failure": settings.failure.model_copy(update={"policy": "dead-letter"}),
            "run": settings.run.model_copy(update={"ready_file": None}),
        }
    )
    rehearsal = Rehearsal(settings, routes, plan)
    try:
        await rehearsal.run(stop, watch)
    finally:
        await rehearsal.close()
    report = rehearsal.report
    report.interrupted = stop.is_set()
    if not report.interrupted:
        report.comparison = await _compared(settings, cluster, plan, rehearsal)
    return report


class Rehearsal:
    def __init__(self, settings: Settings, routes: Routes, plan: Plan) -> None:
        self.report = Report()
        self.comparer = Comparer()
        self.first_ms: int | None = None  # the earliest time that a record carries
        self._settings = settings
        self._routes = routes
        self._plan = plan
        self._judge = Judge(settings)
        self._selection = Selection(settings, plan)
        self._session = Session(settings, "rehearsal")
        self._stalls = Stalls(settings.failure.timeout_ms / 1000, settings.run.stop_timeout_ms / 1000, Readiness(None))
        self._reader = PartitionReader(settings, Decoder(settings, routes.types))
        self._new: set[bytes] = set()  # keys of messages without a row that came already
        self._careful: set[str] = set()  # statements that are sent so that an error shows its message

    async def run(self, stop: asyncio.Event, watch: Watch) -> None:
        waking = asyncio.create_task(self._wake(stop))
        try:
            await self._run_until(stop, watch)
        finally:
            waking.cancel()

    async def close(self) -> None:
        await self._reader.close()
        await self._session.close()
        self._stalls.close()

    async def _wake(self, stop: asyncio.Event) -> None:
        """Let whoever waits for records see that it is to stop."""
        await stop.wait()
        self._reader.news.set()

    async def _run_until(self, stop: asyncio.Event, watch: Watch) -> None:
        self._stalls.start()
        self._reader.start()
        self._reader.assign(
            [one.partition for one in self._plan.ranges], {a.partition: a.end for a in self._plan.ranges}
        )
        live = {one.partition: one for one in self._plan.ranges}
        assignments = self._reader.take_new()
        for assignment in assignments:
            one = live[assignment.partition]
            self._reader.begin(assignment, Reading(one.partition, one.live_id, one.topic_id, 0, 0), one.first)
        positions = {one.partition: one.first for one in self._plan.ranges}
        while not stop.is_set():
            self._reader.raise_failure()
            self._reader.news.clear()
            over = all(assignment.over for assignment in assignments)  # before the last look into the buffers
            batch = self._reader.take()
            if batch:
                await self._process(batch)
                self._reader.release([one for one in assignments if one.partition in batch.readings()])
                positions |= batch.ends()
            elif over:
                return
            elif astray := [one.astray for one in assignments if one.astray]:
                raise SetupError(f"{astray[0]}: records expired before they were read: plan again with --clip")
            else:
                await self._reader.news.wait()
            watch(Moment(sum(positions[at] - one.first for at, one in live.items()), self._plan.records, yields=False))

    async def _process(self, batch: Batch) -> None:
        self._selection.apply(batch)
        records = batch.as_rows()
        times = [at for record in records if (at := record.message.timestamp_ms) is not None]
        self.first_ms = min([*times, *([] if self.first_ms is None else [self.first_ms])], default=None)
        async with self._session.use() as connection:
            await connection.execute("BEGIN")
            try:
                await self._handle(connection, await self._chosen(connection, records))
            finally:
                if not connection.is_closed():
                    await connection.execute("ROLLBACK")

    async def _chosen(self, connection: Connection, records: Sequence[Record]) -> list[Record]:
        """Those that were processed here, or not at all yet; the first of several with one id."""
        rows = await known(connection, [record.key for record in records if record.in_inbox])
        found = {key: place for key, place in rows.items() if place is not None}
        chosen = []
        for record in records:
            here = found.get(record.key, (record.reading.partition_id, record.message.offset))
            again = record.in_inbox and record.key not in found and record.key in self._new
            if record.not_ours or again or here != (record.reading.partition_id, record.message.offset):
                self.report.skipped += 1
                continue
            if record.in_inbox and record.key not in found:
                self._new.add(record.key)
            self.comparer.processed(record.key, record.message.id)
            if record.failure is not None:
                self._failed(record, record.failure)
            else:
                chosen.append(record)
        return chosen

    async def _handle(self, connection: Connection, records: list[Record]) -> None:
        """Run the handlers of these, again without one that fails; in halves if none can be named.

        As in the service, no message is blamed for what a deadlock or an outage did.
        """
        tries = 0
        while records:
            await connection.execute("SAVEPOINT part")
            try:
                outgoing = await self._run(records)
            except HandlerError as error:
                await connection.execute("ROLLBACK TO SAVEPOINT part")
                if self._session.broken(error.error) or self._judge.kind(error.error) is Kind.OUTAGE:
                    raise SetupError(f"the handlers cannot run: {text_of(error.error)}") from error
                match attribute(error, tries=tries, careful=self._careful, judge=self._judge):
                    case Again(_, careful_with):
                        if careful_with is not None:
                            self._careful.add(careful_with)
                        tries += 1
                        await asyncio.sleep(backoff(tries))
                    case Culprit(at, _):
                        records = self._without(records, at, error)
                    case Unattributed() if len(records) > 1:
                        middle = len(records) // 2
                        await self._handle(connection, records[:middle])
                        records = records[middle:]
                    case Unattributed():
                        records = self._without(records, 0, error)
                    case _:  # the connection or the process is at fault
                        raise
                continue
            for record in records:
                if record.failure is None:
                    self.report.processed += 1
                else:
                    self._failed(record, record.failure)
            for output in outgoing:
                self.comparer.made(output)
            return

    async def _run(self, records: list[Record]) -> list[Outgoing]:
        batch = Batch.of_rows(records)
        run = BatchRun(
            self._settings,
            self._session,
            self._routes,
            lambda _, error: self._final_failure(error),
            batch,
            Claims(list(range(len(records)))),
            effect_of=lambda _: None,
            silent_below={},
            careful=self._careful,
            marker=None,
            stalls=self._stalls,
        )
        result = await run.run()
        return [output for encoded in result.outgoing.values() for output in encoded]

    def _final_failure(self, error: Exception) -> Failure | None:
        """Return why a message fails while the batch goes on; None if that is not known to be its own fault."""
        kind = self._judge.kind(error)
        return None if kind is Kind.OUTAGE or sqlstates.is_passing(error) else failure_of(error, kind)

    def _without(self, records: list[Record], at: int, error: HandlerError) -> list[Record]:
        """Count this one as failed, and return the others."""
        self._failed(records[at], failure_of(error.error, self._judge.kind(error.error)))
        return records[:at] + records[at + 1 :]

    def _failed(self, record: Record, failure: Failure) -> None:
        self.report.failed += 1
        self.report.reasons[failure.reason] = self.report.reasons.get(failure.reason, 0) + 1
        if len(self.report.errors) < SHOWN:
            self.report.errors.append(
                {
                    "message_id": record.message.id,
                    "place": record.coordinates,
                    "reason": failure.reason,
                    "detail": failure.detail,
                }
            )


async def _compared(settings: Settings, cluster: Cluster, plan: Plan, rehearsal: Rehearsal) -> Comparison:
    declared = {topic for handler in settings.handlers.values() for topic in handler.outputs}
    topics = await asyncio.to_thread(cluster.topics, rehearsal.comparer.topics | declared)
    partitions = [Partition(name, number) for name, topic in topics.items() for number in sorted(topic.partitions)]
    if partitions:
        logs, ends = await ranges.logs(cluster, partitions), await ranges.ends(cluster, partitions)
        starts = {at: log.start for at, log in logs.items()}
        if rehearsal.first_ms is not None:
            starts |= await ranges.first_at(cluster, partitions, rehearsal.first_ms - CLOCKS_MS, ends)
        spans = {at: range(starts[at], ends[at]) for at in partitions}
        await asyncio.to_thread(scan, settings.kafka, plan.consumer, spans, rehearsal.comparer.sent)
    return rehearsal.comparer.result()
