"""How long outputs stand still when members of a group come and go, as a committed reader sees it."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks import check, database, measure, stats, workload
from benchmarks.errors import BenchError
from benchmarks.job import Job
from benchmarks.pace import Pacer, Stream
from benchmarks.processes import Running
from benchmarks.show import Show
from benchmarks.site import PARTITIONS, Site
from benchmarks.subjects import Processor

RATES = (1_500, 8_000)
CHURN_PER_SECOND = 500
INPUT_PARTITIONS = 6
MOST_ORDERS = 100_000_000  # more than any run sends
BACKLOG_RECORDS = 200_000

WARM_UP_SECONDS = 2.0
CALM_SECONDS = 5.0
LEAD_SECONDS = 1.0  # orders sent this long before an event may be held up by it
PAUSE_SECONDS = 2.0  # between two events
POLL_SECONDS = 0.05
WAIT_SECONDS = 60.0

CALM, JOIN, LEAVE, KILL, RESTART = "calm", "join", "leave", "kill", "kill, restarted"
RUN = "run"  # what has no figures because the run was wrong
BACKLOG = "backlog"
CHURN = "churn"

# Events that no rebalance should log.
ALARMS = ("starting_over", "not_ready")
NOISE_CHARACTERS = 200  # librdkafka names every partition

# Kafka's newer protocol: the broker decides, for each group if asked.
HEARTBEAT_MS = 250
SESSION_MS = 6_000
BROKERS_HEARTBEAT_MS = 5_000
BROKERS_SESSION_MS = 45_000


@dataclass(frozen=True, slots=True)
class Profile:
    name: str
    session_ms: int  # until a silent member is taken for dead
    kafka: Mapping[str, Any]
    group: Mapping[str, str] = field(default_factory=dict)  # settings of the group, on the broker
    workers: int = 1

    def subject(self) -> Processor:
        return Processor(
            self.name,
            f"processor, {self.name}",
            handler="write",
            workers=self.workers,
            profile=None,
            same_batch=False,
            settings={"kafka": self.kafka},
        )


def _consumer(name: str, heartbeat_ms: int, session_ms: int) -> Profile:
    group = {"consumer.heartbeat.interval.ms": str(heartbeat_ms), "consumer.session.timeout.ms": str(session_ms)}
    return Profile(name, session_ms, {"group_protocol": "consumer"}, group)


CLASSIC = Profile("classic", 10_000, {"group_protocol": "classic"})
STATIC = Profile("static", 10_000, {"group_protocol": "classic", "static_membership": True}, workers=2)
PROFILES = (
    CLASSIC,
    _consumer("consumer", HEARTBEAT_MS, SESSION_MS),
    _consumer("consumer-defaults", BROKERS_HEARTBEAT_MS, BROKERS_SESSION_MS),
    STATIC,
)
SESSIONS = {profile.name: profile.session_ms for profile in PROFILES}
NAMES = (*SESSIONS, BACKLOG)


@dataclass(slots=True)
class Stall:
    """One event of one run; milliseconds from send to visible output of the orders that it may have held up."""

    profile: str
    per_second: int  # 0: as fast as it can
    event: str
    moved_ms: float | None = None  # the longest, in partitions that got another owner
    stayed_ms: float | None = None  # and in all others
    p99_ms: float | None = None  # of all of them
    gap_ms: float | None = None  # the longest time without any output
    noise: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Event:
    """What happened to the group, from when until when, and which partitions it moved."""

    name: str
    begun: float
    ended: float = 0.0
    moved: Set[int] = frozenset()
    noise: list[str] = field(default_factory=list)


def take_turns(site: Site, names: list[str], rates: list[int], churn: int, show: Show) -> Iterator[Stall]:
    for profile in PROFILES:
        script = _restart if profile is STATIC else _come_and_go
        for rate in rates if profile.name in names else ():
            show.step(f"rebalances of {profile.name} at {rate} msg/s")
            yield from _reported(come_and_go(site, profile, profile.name, rate, script), show)
    if BACKLOG in names:
        show.step(f"two workers and a backlog of {BACKLOG_RECORDS:,}")
        yield from _reported([backlog(site)], show)
    if churn:
        show.step(f"{churn} joins and leaves at {CHURN_PER_SECOND} msg/s")
        found = come_and_go(site, CLASSIC, CHURN, CHURN_PER_SECOND, lambda scene: _churn(scene, churn))
        yield from _reported(found, show)


def _reported(stalls: list[Stall], show: Show) -> list[Stall]:
    for stall in stalls:
        who = f"{stall.profile:<17} {stall.per_second:>6} msg/s {stall.event:<15}"
        figures = {"moved": stall.moved_ms, "stayed": stall.stayed_ms, "p99": stall.p99_ms, "no output": stall.gap_ms}
        text = ", ".join(f"{name} {value:,.0f} ms" for name, value in figures.items() if value is not None)
        show.say(f"{who} {'WRONG: ' + '; '.join(stall.wrong) if stall.wrong else text}")
        for line in stall.noise:
            show.say(f"{who} noise: {line}")
    return stalls


def come_and_go(
    site: Site, profile: Profile, name: str, per_second: int, script: Callable[[Scene], None]
) -> list[Stall]:
    """One run; a wrong one has no figures, only the reason and the noise."""
    events: list[Event] = []
    with site.topic(f"rebalance-{name}", INPUT_PARTITIONS) as topic, site.job(name, topic) as job:
        if profile.group:
            site.cluster.set_group(job.group, profile.group)
        try:
            with Scene(site, job, profile, per_second, events) as scene:
                script(scene)
                scene.end()
            stream = scene.stream
            pairs, _ = site.cluster.read(job.output, PARTITIONS)
            rows = database.rows(job.database)
            wrong = check.judge(stream.orders, rows.reservations, pairs, rows.stock, rows.inbox)
        except BenchError as error:
            wrong = [str(error)]
    if wrong:
        noise = [line for event in events for line in event.noise]
        return [Stall(name, per_second, RUN, noise=noise, wrong=wrong)]
    return [stall_of(name, per_second, event, stream.sent, stream.seen, stream.places) for event in events]


def backlog(site: Site) -> Stall:
    """Two workers start on a full topic: the longest time without output between the first and the last."""
    subject = Processor(BACKLOG, "", handler="write", workers=2, profile=None, same_batch=False)
    stall = Stall(BACKLOG, 0, BACKLOG)
    feed = site.feed(BACKLOG_RECORDS, partitions=INPUT_PARTITIONS)
    with site.job(BACKLOG, feed.topic) as job:
        try:
            measure.complete(site, subject, job, len(feed))
            pairs, times = site.cluster.read(job.output, PARTITIONS)
            rows = database.rows(job.database)
            stall.wrong = check.judge(feed.orders, rows.reservations, pairs, rows.stock, rows.inbox)
        except BenchError as error:
            stall.wrong = [str(error)]
        stall.noise = noise_in(said(site.folder / f"{job.group}.log"), "workers")
    if not stall.wrong:
        stall.gap_ms = longest_gap(times)
    return stall


def stall_of(
    profile: str,
    per_second: int,
    event: Event,
    sent: Mapping[str, float],
    seen: Mapping[str, float],
    places: Mapping[str, int],
) -> Stall:
    """The figures of one event; times are in seconds. Orders without output are left to the judge."""
    begun = event.begun if event.name == CALM else event.begun - LEAD_SECONDS
    delays = {id_: (seen[id_] - at) * 1000 for id_, at in sent.items() if begun <= at <= event.ended and id_ in seen}
    moved = [delay for id_, delay in delays.items() if places[id_] in event.moved]
    stayed = [delay for id_, delay in delays.items() if places[id_] not in event.moved]
    return Stall(
        profile,
        per_second,
        event.name,
        max(moved, default=None),
        max(stayed, default=None),
        stats.percentile(list(delays.values()), 99) if delays else None,
        longest_gap([at * 1000 for at in seen.values() if begun <= at <= event.ended]),
        event.noise,
    )


def longest_gap(times: list[float] | list[int]) -> float | None:
    return max((float(later - earlier) for earlier, later in pairwise(sorted(times))), default=None)


def said(log: Path) -> list[dict[str, Any]]:
    """The lines of a log that are events; a process that is killed may leave half a line."""
    found = []
    for line in log.read_text(errors="replace").splitlines():
        try:
            fields = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(fields, dict):
            found.append(fields)
    return found


def noise_in(lines: list[dict[str, Any]], member: str) -> list[str]:
    return [
        f"{member}: {line.get('event')} {line.get('reason', '')}".strip()[:NOISE_CHARACTERS]
        for line in lines
        if line.get("event") in ALARMS or line.get("level") in ("error", "critical")
    ]


def ready_in(lines: list[dict[str, Any]]) -> set[int]:
    """The partitions that a member took over."""
    names = [line["partition"] for line in lines if line.get("event") == "partition_ready"]
    return {int(name.rpartition("[")[2].removesuffix("]")) for name in names}


class Member:
    """A process of the group, and its log."""

    def __init__(self, name: str, running: Running, log: Path) -> None:
        self.name = name
        self.running = running
        self._log = log
        self._heard = 0

    def said(self) -> list[dict[str, Any]]:
        return said(self._log)

    def noise(self) -> list[str]:
        """Noise that was not returned before."""
        lines = self.said()
        new, self._heard = lines[self._heard :], len(lines)
        return noise_in(new, self.name)


class Scene:
    """A group under a steady load; every event is over when all partitions are owned and nothing is waiting."""

    def __init__(self, site: Site, job: Job, profile: Profile, per_second: int, events: list[Event]) -> None:
        self._site = site
        self._job = job
        self._profile = profile
        self._per_second = per_second
        self._events = events
        self._members: list[Member] = []
        self._command = profile.subject().prepare(job, site.folder)
        self._open = ExitStack()
        self._pacing = ExitStack()
        self.stream = Stream(site, job, INPUT_PARTITIONS)

    def __enter__(self) -> Self:
        self._open.enter_context(self.stream)
        self._open.enter_context(self._pacing)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        if self._events:  # from members that are gone by now
            self._events[-1].noise += self._noise()

    def begin(self) -> None:
        """Start the first member; after its first answer orders keep coming."""
        first = self._start()
        orders = workload.orders(MOST_ORDERS)
        self.stream.send(*next(orders))
        self._wait(lambda: self._is_answered(1), first, "the first answer")
        self._pacing.enter_context(Pacer(self.stream, orders, self._per_second))
        time.sleep(WARM_UP_SECONDS)

    def calm(self) -> None:
        event = self._begin(CALM)
        time.sleep(CALM_SECONDS)
        event.ended = time.perf_counter()
        time.sleep(PAUSE_SECONDS)  # or its last orders would be answered while the next event begins
        event.noise = self._noise()

    def join(self) -> Member:
        event = self._begin(JOIN)
        member = self._start()
        share = INPUT_PARTITIONS // len([each for each in self._members if each.running.ended() is None])
        self._wait(lambda: len(ready_in(member.said())) >= share, member, "its share of the partitions")
        self._end(event, ready_in(member.said()))
        return member

    def leave(self, member: Member) -> None:
        self._go(member, LEAVE, member.running.stop, WAIT_SECONDS)

    def kill(self, member: Member) -> None:
        self._go(member, KILL, member.running.kill, WAIT_SECONDS + self._profile.session_ms / 1000)

    def kill_worker(self) -> None:
        """Stop one of the workers that the first member supervises; it starts another."""
        (first,) = self._members
        event = self._begin(RESTART)
        before = len(first.said())
        os.kill(next(line["pid"] for line in first.said() if line["event"] == "worker_started"), signal.SIGKILL)
        share = INPUT_PARTITIONS // self._profile.workers
        self._wait(lambda: len(ready_in(first.said()[before:])) >= share, first, "the killed worker's partitions")
        self._end(event, ready_in(first.said()[before:]))

    def end(self) -> None:
        """Wait for all answers, then stop all members."""
        self._pacing.close()
        self.stream.wait()
        for member in self._members:
            if member.running.ended() is None:
                member.running.stop()

    def _go(self, member: Member, name: str, how: Callable[[], None], seconds: float) -> None:
        first = self._members[0]
        partitions = ready_in(member.said())
        before = len(first.said())
        event = self._begin(name)
        how()
        self._wait(lambda: partitions <= ready_in(first.said()[before:]), first, "the partitions of the other", seconds)
        self._end(event, partitions)

    def _begin(self, name: str) -> Event:
        event = Event(name, time.perf_counter())
        self._events.append(event)
        return event

    def _end(self, event: Event, moved: Set[int]) -> None:
        sent = len(self.stream.sent)
        self._wait(lambda: self._is_answered(sent), self._members[0], f"all answers behind a {event.name}")
        event.ended = time.perf_counter()
        event.moved = moved
        time.sleep(PAUSE_SECONDS)
        event.noise = self._noise()

    def _start(self) -> Member:
        name = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"[len(self._members) % 26]
        log = self._site.folder / f"{self._job.group}-{len(self._members)}.log"
        running = Running(self._site.keeper, self._command, log)
        self._open.enter_context(running)
        member = Member(name, running, log)
        self._members.append(member)
        return member

    def _is_answered(self, count: int) -> bool:
        return self.stream.answered() >= count

    def _wait(self, condition: Callable[[], bool], member: Member, what: str, seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or member.running.ended() is not None:
                waited = f"{member.name} waited for {what}"
                raise BenchError(f"{waited}, {seconds:.0f} s at most; it last said: {member.running.last_words()}")
            time.sleep(POLL_SECONDS)

    def _noise(self) -> list[str]:
        return [line for member in self._members for line in member.noise()]


def _come_and_go(scene: Scene) -> None:
    scene.begin()
    scene.calm()
    scene.leave(scene.join())
    scene.kill(scene.join())


def _restart(scene: Scene) -> None:
    scene.begin()
    scene.calm()
    scene.kill_worker()


def _churn(scene: Scene, times: int) -> None:
    scene.begin()
    scene.calm()
    for _ in range(times):
        scene.leave(scene.join())
