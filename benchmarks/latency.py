"""The time from a producer's send to a committed reader: under a steady load, and from idle."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks import check, database, stats, workload
from benchmarks.errors import BenchError
from benchmarks.pace import Stream
from benchmarks.processes import Running
from benchmarks.show import Show
from benchmarks.site import PARTITIONS, Site
from benchmarks.subjects import BARE, Processor, Subject

PER_SECOND = 500
WARM_UP_SECONDS = 2.0
IDLE_MESSAGES = 20
# Longer than any linger.
IDLE_SECONDS = 0.15

DEFAULT = Processor("default", "processor, default profile", profile=None, same_batch=False)


@dataclass(slots=True)
class Latency:
    subject: str
    repetition: int
    messages: int
    p50: float = 0.0  # ms, at the steady load
    p99: float = 0.0
    idle_p50: float = 0.0  # one message at a time
    idle_p99: float = 0.0
    wrong: list[str] = field(default_factory=list)


PROFILES = [
    Processor(name, f"processor, profile {name}", profile=name, same_batch=False)
    for name in ("latency", "balanced", "throughput")
]


def take_turns(site: Site, seconds: float, repeat: int, show: Show, *, with_profiles: bool) -> list[Latency]:
    """The bare loop and the default profile alternate; each other profile has one turn."""
    turns: list[tuple[Subject, int]] = [(subject, turn) for turn in range(repeat) for subject in (BARE, DEFAULT)]
    if with_profiles:
        turns += [(subject, 0) for subject in PROFILES]
    found = []
    for subject, turn in turns:
        show.step(f"latency of {subject.name} at {PER_SECOND} msg/s, {turn + 1}")
        one = measure(site, subject, turn, seconds)
        found.append(one)
        figures = (
            f"p50 {one.p50:6.1f} ms, p99 {one.p99:6.1f} ms; from idle {one.idle_p50:6.1f} ms, {one.idle_p99:6.1f} ms"
        )
        show.say(f"{subject.name:<12} {'WRONG: ' + '; '.join(one.wrong) if one.wrong else figures}")
    return found


def measure(site: Site, subject: Subject, repetition: int, seconds: float) -> Latency:
    steady = int(PER_SECOND * seconds)
    result = Latency(subject.name, repetition, steady)
    with site.topic(f"latency-{subject.name}") as topic, site.job(subject.name, topic) as job:
        command = subject.prepare(job, site.folder)
        log = site.folder / f"{job.group}.log"
        with Running(site.keeper, command, log) as running, Stream(site, job) as stream:
            try:
                idle, loaded = _send(stream, steady)
            except BenchError as error:
                result.wrong = [f"{error}; it last said: {running.last_words()}"]
                return result
            running.stop()
        result.p50, result.p99 = _percentiles(loaded)
        result.idle_p50, result.idle_p99 = _percentiles(idle)
        pairs, _ = site.cluster.read(job.output, PARTITIONS)
        rows = database.rows(job.database)
        result.wrong = check.judge(stream.orders, rows.reservations, pairs, rows.stock, rows.inbox)
    return result


def _send(stream: Stream, steady: int) -> tuple[list[float], list[float]]:
    """Milliseconds for single messages, and under the steady load behind its warm-up."""
    warm = int(PER_SECOND * WARM_UP_SECONDS)
    orders = workload.orders(1 + IDLE_MESSAGES + warm + steady)
    for order in itertools.islice(orders, 1 + IDLE_MESSAGES):
        stream.send(*order)
        stream.wait()  # the first order waits until the subject has joined its group
        time.sleep(IDLE_SECONDS)
    stream.pace(orders, PER_SECOND)
    stream.wait()
    ids = list(stream.sent)
    return stream.delays(ids[1 : 1 + IDLE_MESSAGES]), stream.delays(ids[-steady:])


def _percentiles(delays: Sequence[float]) -> tuple[float, float]:
    return stats.percentile(delays, 50), stats.percentile(delays, 99)
