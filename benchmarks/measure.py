"""One run of one subject: start it, watch it from outside, stop it, judge it, and only then believe its rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from confluent_kafka import Consumer

from benchmarks import check, cpu, database, stats
from benchmarks.cpu import Sample
from benchmarks.errors import BenchError
from benchmarks.job import Job
from benchmarks.processes import Running
from benchmarks.site import PARTITIONS, Filled, Site
from benchmarks.subjects import BARE, Subject
from benchmarks.workload import Feed

POLL_SECONDS = 0.05
STANDSTILL_SECONDS = 45.0
WARM_UP_RECORDS = 100_000

Tell = Callable[[int, int], None]


def _nothing(_done: int, _of: int) -> None:
    return None


@dataclass(slots=True)
class Run:
    subject: str
    repetition: int
    records: int
    rate: float | None = None  # outputs per second; None if the run was wrong
    cpu: dict[str, float] = field(default_factory=dict)  # µs per record: subject, postgres, broker
    wrong: list[str] = field(default_factory=list)


class Ended(BenchError):
    """The subject stopped or stands still: nothing more will come."""


def measure(
    site: Site,
    subject: Subject,
    feed: Feed,
    repetition: int,
    *,
    filled: Filled | None = None,
    tell: Tell = _nothing,
) -> Run:
    run = Run(subject.name, repetition, len(feed))
    with site.job(subject.name, feed.topic, filled) as job:
        try:
            first, last = complete(site, subject, job, len(feed), tell)
        except Ended as ended:
            run.wrong = [str(ended)]
            return run
        pairs, times = site.cluster.read(job.output, PARTITIONS)
        rows = database.rows(job.database)
        inbox = None if rows.inbox is None else rows.inbox - (filled.inbox_rows if filled else 0)
        run.wrong = check.judge(feed.orders, rows.reservations, pairs, rows.stock, inbox, feed.poison)
        if not run.wrong:
            try:
                run.rate = stats.steady_rate(times)
                run.cpu = cpu.per_record(first, last, times)
            except ValueError as error:
                run.wrong = [str(error)]
    return run


def warm_up(site: Site) -> None:
    """A broker that was just started needs twice the processor time: no subject is measured on it."""
    measure(site, BARE, site.feed(WARM_UP_RECORDS), 0)


def complete(site: Site, subject: Subject, job: Job, records: int, tell: Tell = _nothing) -> tuple[Sample, Sample]:
    """Run a subject until all outputs are visible, then stop it; returns the processor time used at two moments."""
    command = subject.prepare(job, site.folder)
    with Running(site.keeper, command, site.folder / f"{job.group}.log") as running:
        samples = _watch(site, job, running, records, tell)
        running.stop()
    return samples


def _watch(site: Site, job: Job, running: Running, records: int, tell: Tell) -> tuple[Sample, Sample]:
    """Wait until all outputs are visible; returns the processor time used at both ends of the measured part."""
    roots = {"subject": [running.pid], **site.pids}
    first: Sample | None = None
    last: Sample | None = None
    progress = _Progress(site, job, records)
    seen, changed = -1, time.monotonic()
    try:
        while True:
            code = running.ended()
            done = progress.look()
            if first is None and done >= records * stats.WARM_UP:
                first = cpu.sample(time.time() * 1000, roots)
            if last is None and done >= records * stats.STEADY_UNTIL:
                last = cpu.sample(time.time() * 1000, roots)
            if progress.complete:
                assert first is not None
                assert last is not None
                return first, last
            now = time.monotonic()
            if done != seen:
                seen, changed = done, now
                tell(done, records)
            if code is not None:
                raise Ended(f"ended with exit code {code} after {done} of {records} outputs: {running.last_words()}")
            if now - changed > STANDSTILL_SECONDS:
                raise Ended(f"stood still at {done} of {records} outputs: {running.last_words()}")
            time.sleep(POLL_SECONDS)
    finally:
        progress.close()


class _Progress:
    """How many outputs are visible, at the least cost for the subject that is measured.

    As long as possible it only asks for the end of the topic. That counts transaction markers too, so the last outputs
    are counted by reading the topic from its beginning: during the last moment of a run in big transactions, during
    half of one with a transaction per record.
    """

    def __init__(self, site: Site, job: Job, records: int) -> None:
        self._site = site
        self._job = job
        self._records = records
        self._reader: Consumer | None = None
        self._read = 0
        self.counting = False

    @property
    def complete(self) -> bool:
        return self._read >= self._records

    def look(self) -> int:
        if not self.counting:
            end = self._site.cluster.ends(self._job.output, PARTITIONS)
            self.counting = end >= self._records
            return min(end, self._records - 1)
        if self._reader is None:
            self._reader = self._site.cluster.reader(self._job.output, PARTITIONS)
        while messages := self._reader.consume(10_000, POLL_SECONDS):
            self._read += sum(message.error() is None for message in messages)
            if self.complete:
                break
        return self._read

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
