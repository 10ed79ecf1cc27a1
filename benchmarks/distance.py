"""Throughput by handler form when Postgres is a delay away, with keys that repeat, beside the bare loop there.

Near is Postgres on this machine. Each other place is behind a proxy that holds every byte back; what the proxy itself
costs shows at 0 ms.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import urlsplit, urlunsplit

from benchmarks import database, proxy, stats
from benchmarks.errors import BenchError
from benchmarks.job import Job
from benchmarks.measure import measure
from benchmarks.processes import Command, Running
from benchmarks.show import Show
from benchmarks.site import Site
from benchmarks.subjects import BARE, Processor, Subject
from benchmarks.workload import Feed

if TYPE_CHECKING:
    from benchmarks.database import Connection

NEAR = "near"
DELAYS = (0.0, 1.0, 5.0)  # ms
HOT_KEYS = 200
# A subject that waits for every message gets as many as it can do in this time.
SECONDS = 8.0
START_SECONDS = 10.0
PINGS = 50

FOREIGN_KEY = "ALTER TABLE reservations ADD FOREIGN KEY (sku) REFERENCES stock (sku)"


@dataclass(frozen=True, slots=True)
class Form(Processor):
    """A handler form, as a user deploys it: with the batches of its profile."""

    module: str = "benchmarks.far_handlers"
    profile: str | None = None
    same_batch: bool = False
    hot: bool = False  # orders are keyed by their product, of which there are few
    foreign_key: bool = False
    waits: int = 0  # round trips that it waits for, per message

    def prepare(self, job: Job, folder: Path) -> Command:
        if self.foreign_key:
            database.connected(job.database, lambda connection: connection.execute(FOREIGN_KEY))
        return super(Form, self).prepare(job, folder)


@dataclass(frozen=True, slots=True)
class Away(Subject):
    """A subject that finds Postgres at another port."""

    of: Subject = field(kw_only=True)
    port: int = field(kw_only=True)

    def prepare(self, job: Job, folder: Path) -> Command:
        return self.of.prepare(replace(job, database=_at_port(job.database, self.port)), folder)


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    delay: float = 0.0  # ms
    port: int | None = None  # None where nothing is in between


@dataclass(slots=True)
class Distant:
    """One run of one subject at one place."""

    subject: str
    place: str
    repetition: int
    records: int
    rate: float | None
    round_trip_ms: float  # measured right before
    batch: int | None = None  # records of a usual batch
    round_trips: dict[str, int] = field(default_factory=dict)  # of that batch, by purpose
    wrong: list[str] = field(default_factory=list)


_DEBUG = {"PROCESSOR_LOG_LEVEL": "debug"}  # a line per batch, with its round trips


def _form(name: str, title: str, handler: str, share: float, **more: object) -> Form:
    return Form(name, f"processor, {title}", handler=handler, share=share, environment=_DEBUG, **more)  # type: ignore[arg-type]


SUBJECTS: tuple[Subject, ...] = (
    BARE,
    _form("batch", "batch handler, two array statements", "batch", 1.5, profile="throughput"),
    _form("collect", "collect twice", "collect", 1.0),
    _form("collect-hot", f"the same, {HOT_KEYS} keys", "collect", 1.0, hot=True),
    _form("write", "write twice", "write", 1.0),
    _form("write-hot", f"the same, {HOT_KEYS} keys", "write", 1.0, hot=True),
    _form("write-fk", "the same with a foreign key", "write", 1.0, hot=True, foreign_key=True),
    _form("read", "one read, then one write", "read", 0.1, waits=2),
    _form("read-16", "the same, concurrency = 16", "read", 0.1, waits=2, concurrency=16),
    _form("execute", "execute twice", "execute", 0.1, waits=2),
)


def take_turns(
    site: Site, subjects: Sequence[Subject], delays: Sequence[float], records: int, repeat: int, show: Show
) -> Iterator[Distant]:
    """Each subject goes from place to place before the next one has its turn: ratios are between neighbours."""
    with ExitStack() as open_:
        places = [Place(NEAR), *(open_.enter_context(behind_proxy(site, delay)) for delay in delays)]
        for repetition in range(repeat):
            for subject in subjects if repetition % 2 == 0 else subjects[::-1]:
                for place in places if repetition % 2 == 0 else places[::-1]:
                    show.step(f"{subject.name}, {place.name}, {repetition + 1} of {repeat}")
                    one = measure_at(site, subject, place, records, repetition, show)
                    show.say(f"{subject.name:<12} {place.name:<6} {_text(one)}")
                    yield one


def measure_at(site: Site, subject: Subject, place: Place, records: int, repetition: int, show: Show) -> Distant:
    feed = _feed(site, subject, place, records)
    there = Away(subject.name, subject.title, subject.module, of=subject, port=place.port) if place.port else subject
    round_trip = database.connected(_at_port(site.server.url, place.port), _round_trip_ms)
    run = measure(site, there, feed, repetition, tell=show.progress)
    one = Distant(subject.name, place.name, repetition, len(feed), run.rate, round_trip, wrong=run.wrong)
    if isinstance(subject, Processor) and not run.wrong:
        log = max(site.folder.glob(f"bench-{subject.name}-????????.log"), key=lambda path: path.stat().st_mtime_ns)
        one.batch, one.round_trips = usual_batch(log.read_text())
    return one


def usual_batch(log: str) -> tuple[int, dict[str, int]]:
    """Records and round trips of the batch in the middle, by how many it had, of those of the measured part."""
    lines = [json.loads(line) for line in log.splitlines() if '"batch_committed"' in line]
    steady = lines[int(len(lines) * stats.WARM_UP) : int(len(lines) * stats.STEADY_UNTIL) + 1]
    ordered = sorted(steady, key=lambda line: sum(line["round_trips"].values()))
    middle = ordered[len(ordered) // 2]
    return middle["records"], middle["round_trips"]


@contextmanager
def behind_proxy(site: Site, delay: float) -> Iterator[Place]:
    """A place from which Postgres is this many milliseconds away, there and back."""
    target = urlsplit(site.server.url)
    arguments = [sys.executable, "-m", proxy.__name__, str(target.hostname), str(target.port), str(delay)]
    with Running(site.keeper, Command(arguments, {}), site.folder / f"proxy-{delay:g}.log") as running:
        deadline = time.monotonic() + START_SECONDS
        while not (said := running.last_words()).isdecimal():
            if running.ended() is not None or time.monotonic() > deadline:
                raise BenchError(f"the proxy for {delay:g} ms did not start: {said}")
            time.sleep(0.01)
        yield Place(f"{delay:g} ms", delay, int(said))


def _feed(site: Site, subject: Subject, place: Place, records: int) -> Feed:
    wanted = subject.records(records)
    if not isinstance(subject, Form):
        return site.feed(wanted)
    if subject.waits and place.delay:
        wanted = min(wanted, max(1000, int(SECONDS * 1000 / (subject.waits * place.delay) * subject.concurrency)))
    return site.feed(wanted, keys=HOT_KEYS if subject.hot else 0)


def _at_port(url: str, port: int | None) -> str:
    parts = urlsplit(url)
    if port is None:
        return url
    login, at, _ = parts.netloc.rpartition("@")
    return urlunsplit(parts._replace(netloc=f"{login}{at}{proxy.LOOPBACK}:{port}"))


async def _round_trip_ms(connection: Connection) -> float:
    statement = await connection.prepare("SELECT 1")
    took = []
    for _ in range(PINGS):
        began = time.perf_counter()
        await statement.fetchval()
        took.append(time.perf_counter() - began)
    return median(took) * 1000


def _text(one: Distant) -> str:
    if one.rate is None:
        return f"WRONG: {'; '.join(one.wrong)}"
    trips = f", {sum(one.round_trips.values())} round trips for {one.batch} records" if one.batch else ""
    return f"{one.rate:>9,.0f} msg/s{trips}"
