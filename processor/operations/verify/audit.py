"""`processor verify`: reads input and outputs again and proves that nothing was lost or doubled, without the engine.

What it can show and what it cannot is in docs/verify.md. Memory does not grow with the number of records: what has to
be compared in the end lies in files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from processor.kafka.scan import Scan
from processor.operations.verify import plan as plans
from processor.operations.verify import state
from processor.operations.verify.findings import Finding, Findings
from processor.operations.verify.identity import Identity
from processor.operations.verify.inputs import Inputs
from processor.operations.verify.origins import Origins
from processor.operations.verify.questions import Book
from processor.operations.verify.settle import Settlement
from processor.operations.verify.spill import BUCKETS
from processor.operations.verify.state import Progress
from processor.postgres import audit

if TYPE_CHECKING:
    from processor.messages.message import Partition
    from processor.operations.verify.plan import Span, Wanted
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

# How much is done again after a crash, at most.
CHECKPOINT_SECONDS = 5.0
# Records that are named and looked up together.
CHUNK = 2000


class Watcher(Protocol):
    """Hears how an audit proceeds."""

    def begin(self, total: int) -> None:
        """So many offsets are to be read."""

    def read(self, done: int, total: int) -> None:
        """So many of them are."""

    def comparing(self) -> None:
        """All is read."""


class Chunk(NamedTuple):
    """Records of one span that were read together."""

    records: list[Any]
    position: int  # behind them
    expired: int  # offsets of the span that the log lost before they were read
    first_ms: int | None  # the timestamp of the first


@dataclass(frozen=True, slots=True)
class Report:
    progress: Progress
    resumed: bool
    interrupted: bool
    seconds: float  # of this run

    @property
    def ok(self) -> bool:
        return not self.progress.findings.total


async def run(
    db: Connection,
    settings: Settings,
    wanted: Wanted,
    *,
    where: Path,
    limit: int,
    stop: asyncio.Event,
    watcher: Watcher,
) -> Report:
    """Audit, or go on with the audit that was interrupted there."""
    began = time.monotonic()
    about = _about(settings, wanted)
    progress = state.load(where, about)
    resumed = progress is not None
    if progress is None:
        plan = await plans.make(db, settings, wanted)
        progress = Progress(about, plan, Findings(limit), time.time())
        for finding in plan.findings:
            progress.findings.add(finding)
    progress.findings.limit = limit
    running = Audit(db, settings, wanted, progress, where, stop, watcher)
    finished = await running.run()
    return Report(progress, resumed, not finished, time.monotonic() - began)


def _about(settings: Settings, wanted: Wanted) -> Mapping[str, Any]:
    """All that two runs must have in common to be one audit."""
    return {
        "consumer": settings.consumer,
        "topics": settings.topics,
        "message": settings.message.model_dump(mode="json"),
        "without_inbox": sorted(name for name, handler in settings.handlers.items() if not handler.inbox),
        "bootstrap_servers": settings.kafka.bootstrap_servers,
        "wanted": asdict(replace(wanted, since=None, until=None)),
    }


class Audit:
    def __init__(
        self,
        db: Connection,
        settings: Settings,
        wanted: Wanted,
        progress: Progress,
        where: Path,
        stop: asyncio.Event,
        watcher: Watcher,
    ) -> None:
        self._db = db
        self._settings = settings
        self._wanted = wanted
        self._progress = progress
        self._where = where
        self._stop = stop
        self._watcher = watcher
        self._book = Book(where, progress.sizes)
        self._saved = time.monotonic()

    async def run(self) -> bool:
        """Return whether it was finished; if not, the next run goes on."""
        progress = self._progress
        self._watcher.begin(progress.total)
        below = await audit.forgotten(self._db, self._settings.consumer)
        await self._read(below)
        if not self._stop.is_set():
            self._watcher.comparing()
            # Once more: retention may have come by since a row was looked up.
            await self._compare(await audit.forgotten(self._db, self._settings.consumer))
        if self._stop.is_set():
            self._save()
            return False
        await self._look_for_owed()
        self._book.delete()
        state.delete(self._where)
        return True

    async def _read(self, below: Mapping[Partition, int]) -> None:
        progress, consumer = self._progress, self._settings.consumer
        inputs = Inputs(self._settings, self._book, progress.inputs, progress.findings, below)
        origins = Origins(
            consumer,
            self._output_topics,
            self._book,
            progress.outputs,
            progress.findings,
            sole_writer=self._wanted.sole_writer,
        )
        scan = await asyncio.to_thread(Scan, self._settings.kafka, consumer)
        try:
            for span in progress.plan.spans:
                if span.position < span.end and not self._stop.is_set():
                    await self._read_span(scan, span, inputs if span.is_input else origins)
        finally:
            await asyncio.to_thread(scan.close)

    async def _read_span(self, scan: Scan, span: Span, side: Inputs | Origins) -> None:
        """While Postgres looks one chunk up, the next one is read and its records are named."""
        await asyncio.to_thread(scan.begin, span.at, span.position, span.end)
        lost_before = span.expired

        def read() -> Chunk:
            raws: list[Any] = []
            while len(raws) < CHUNK and (more := scan.more()):
                raws += more
            first_ms = raws[0].timestamp()[1] if raws else None
            return Chunk(side.read(raws, span), scan.position, lost_before + scan.expired, first_ms)

        reading = asyncio.create_task(asyncio.to_thread(read))
        try:
            while True:
                chunk = await reading
                last = chunk.position >= span.end or self._stop.is_set()
                if not last:
                    reading = asyncio.create_task(asyncio.to_thread(read))
                if chunk.records:
                    await side.judge(self._db, chunk.records, span)
                    if span.first_ms is None or chunk.expired > span.expired:
                        span.first_ms = chunk.first_ms
                span.position, span.expired = chunk.position, chunk.expired
                self._watcher.read(self._progress.done, self._progress.total)
                self._save_if_due()
                if last:
                    break
        finally:
            await asyncio.wait([reading])

    async def _compare(self, below: Mapping[Partition, int]) -> None:
        progress = self._progress
        plan = progress.plan
        all_have_rows = Identity(self._settings).all_in_inbox and not below
        all_read = plan.all_of_input and not any(span.expired for span in plan.spans if span.is_input)
        settlement = Settlement(
            self._book,
            self._output_topics,
            progress.inputs,
            progress.outputs,
            progress.findings,
            below=below,
            origins_complete=all_have_rows or all_read,
            gaps_from_ms=plan.begins_ms() if plan.gaps_judged else None,
        )
        self._book.flush()
        while progress.buckets < BUCKETS and not self._stop.is_set():
            await asyncio.to_thread(settlement.settle, progress.buckets)
            progress.buckets += 1
            self._save_if_due()

    async def _look_for_owed(self) -> None:
        """Outputs that were stored before a crash, and that nobody has come to send since."""
        consumer, topics = self._settings.consumer, sorted(self._settings.topics)
        seconds = self._settings.kafka.transaction_timeout_ms / 1000
        owed = await audit.owed(self._db, consumer, topics, seconds)
        if not owed:
            return
        committed = await asyncio.to_thread(plans.committed, self._settings, sorted({one.partition for one in owed}))
        for one in owed:
            at = committed[one.partition]
            if at is None or at.offset < one.next_offset:
                why = f"the committed offset is {'none' if at is None else at.offset}: is the service running?"
                self._progress.findings.add(Finding("unsent_outputs", *one.partition, one.next_offset - 1, None, why))

    def _save_if_due(self) -> None:
        if time.monotonic() - self._saved > CHECKPOINT_SECONDS:
            self._save()
        elif self._book.full():
            self._book.flush()

    def _save(self) -> None:
        self._book.flush()
        self._progress.sizes = self._book.sizes()
        state.save(self._where, self._progress)
        self._saved = time.monotonic()

    @property
    def _output_topics(self) -> list[str]:
        return sorted({span.topic for span in self._progress.plan.spans if not span.is_input})
