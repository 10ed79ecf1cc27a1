"""Memory over time: a steady load for minutes, the worker's resident memory once a second."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import psutil

from benchmarks import check, database, stats, workload
from benchmarks.errors import BenchError
from benchmarks.pace import Stream
from benchmarks.processes import Running
from benchmarks.show import Show
from benchmarks.site import PARTITIONS, Site
from benchmarks.subjects import Processor

SAMPLE_SECONDS = 1.0
MEGABYTE = 1_000_000

SUBJECT = Processor("soak", "processor, default profile", profile=None, same_batch=False)


@dataclass(slots=True)
class Soak:
    minutes: float
    per_second: int
    rss_mb: list[float] = field(default_factory=list)  # one a second
    p99_ms: float = 0.0
    wrong: list[str] = field(default_factory=list)

    @property
    def flatness(self) -> float:
        return stats.flatness(self.rss_mb)

    @property
    def highest_mb(self) -> float:
        return max(self.rss_mb)


def soak(site: Site, minutes: float, per_second: int, show: Show) -> Soak:
    result = Soak(minutes, per_second)
    orders = workload.orders(int(minutes * 60 * per_second))
    with site.topic("soak") as topic, site.job(SUBJECT.name, topic) as job:
        command = SUBJECT.prepare(job, site.folder)
        log = site.folder / f"{job.group}.log"
        with Running(site.keeper, command, log) as running, Stream(site, job) as stream:
            stream.send(*next(orders))
            stream.wait()
            show.step(f"{per_second} msg/s for {minutes:g} minutes")
            with _Sampler(running.pid, result, show):
                stream.pace(orders, per_second)
            try:
                stream.wait()
            except BenchError as error:
                result.wrong = [f"{error}; it last said: {running.last_words()}"]
                return result
            running.stop()
        result.p99_ms = stats.percentile(stream.delays(stream.sent), 99)
        pairs, _ = site.cluster.read(job.output, PARTITIONS)
        rows = database.rows(job.database)
        result.wrong = check.judge(stream.orders, rows.reservations, pairs, rows.stock, rows.inbox)
    return result


class _Sampler:
    """A thread, because the feed must not wait for it."""

    def __init__(self, pid: int, result: Soak, show: Show) -> None:
        self._process = psutil.Process(pid)
        self._result = result
        self._show = show
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="sample", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            try:
                self._result.rss_mb.append(self._process.memory_info().rss / MEGABYTE)
            except psutil.NoSuchProcess:
                return
            self._show.progress(len(self._result.rss_mb), int(self._result.minutes * 60))
