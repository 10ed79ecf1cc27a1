"""Retention beside the service: what it costs while both are busy, who waits for it, and whether the inbox levels off.

The hand is the service's own (processor/retention/round.py), run from here so that it can be switched on and off: the
processor works off a backlog, and stretches with and without the hand take turns in one and the same run.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from datetime import timedelta
from statistics import median
from typing import TYPE_CHECKING, Self

from benchmarks import check, database
from benchmarks.errors import BenchError
from benchmarks.processes import Running
from benchmarks.show import Show
from benchmarks.site import PARTITIONS, Site
from benchmarks.subjects import Processor
from processor.kafka.cluster import Cluster
from processor.retention.round import Done, Hand
from processor.settings.load import load

if TYPE_CHECKING:
    from benchmarks.database import Connection
    from benchmarks.job import Job
    from processor.settings.schema import Settings

ROWS = 2_000_000
RECORDS = 4_000_000
CYCLES = 10
CYCLE_ROWS = 400_000
STRETCH_SECONDS = 5.0
SAMPLE_SECONDS = 0.004
POLL_SECONDS = 0.05
STANDSTILL_SECONDS = 90.0
# The first and the last part of the backlog are not measured.
WARM_UP, STEADY_UNTIL = 0.05, 0.97

# A handler of single messages keeps both cores busy for long enough with a backlog of this size. The service itself
# keeps everything: the hand is ours.
SUBJECT = Processor(
    "retention", "processor, per message: write", handler="write", environment={"PROCESSOR_RETENTION__DAYS": "0"}
)

# Below all offsets, and of no order: rows of a month ago.
OLD_ROWS = f"""
    INSERT INTO inbox (key, partition_id, "offset", payload_hash, received_at)
    SELECT gen_random_uuid(), 1 + n % {PARTITIONS}, -1, n, $2::timestamptz + n * $3::interval / $1
    FROM generate_series(1, $1::integer) n
"""  # noqa: S608 - a constant of ours
# The backlog has been there for a day. Without such a note nothing may go while records wait.
NOTE = f"""
    INSERT INTO log_ends SELECT n, $1::timestamptz, 0 FROM generate_series(1, {PARTITIONS}) n
    ON CONFLICT (partition_id, at) DO NOTHING
"""  # noqa: S608 - a constant of ours

# Whoever waits for a lock that the hand's connection holds.
WAITING = """
    SELECT pid FROM pg_stat_activity
    WHERE wait_event_type = 'Lock' AND $1 = ANY (pg_blocking_pids(pid)) AND datname = current_database()
"""

LEDGER = f"""
    INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions, first_offset, next_offset, owner)
    SELECT $1, $2, n, 1, $3, {PARTITIONS}, 0, 0, 'benchmark' FROM generate_series(0, {PARTITIONS - 1}) n
"""  # noqa: S608 - a constant of ours

SIZES = """
    SELECT pg_relation_size('inbox') AS heap, pg_relation_size('inbox_pkey') AS index,
           (SELECT count(*) FROM inbox) AS rows
"""
# Whether autovacuum has come since, and has left nothing that it would come again for. Hours lie between two rounds.
CLEARED = """
    SELECT s.autovacuum_count > $1 AND s.n_dead_tup < 10000 + 0.03 * c.reltuples
    FROM pg_stat_user_tables s JOIN pg_class c ON c.oid = s.relid WHERE s.relname = 'inbox'
"""
VACUUMS = "SELECT autovacuum_count FROM pg_stat_user_tables WHERE relname = 'inbox'"


@dataclass(slots=True)
class Cycle:
    """What the inbox takes up after a round."""

    number: int
    rows: int
    heap: int
    index: int


@dataclass(slots=True)
class Retention:
    rows: int  # expired, before the run
    deleted: int = 0
    with_hand: list[float] = field(default_factory=list)  # messages per second, stretch by stretch
    without_hand: list[float] = field(default_factory=list)
    longest_wait_ms: float = 0.0  # of a transaction of the service for the hand
    longest_step_ms: float = 0.0  # how long somebody could have waited
    steps: int = 0
    cycles: list[Cycle] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The rate beside the hand, as a share of that without it: the median over neighbouring stretches."""
        pairs = zip(self.with_hand, self.without_hand, strict=False)
        pairs = zip(self.with_hand, self.without_hand, strict=False)
        return median(beside / alone for beside, alone in pairs)

    @property
    def growth(self) -> float:
        """Heap and index after the last cycle, as a share of those after the fourth."""
        fourth, last = self.cycles[min(3, len(self.cycles) - 1)], self.cycles[-1]
        return (last.heap + last.index) / (fourth.heap + fourth.index)


def beside(site: Site, rows: int, records: int, pace: int, show: Show) -> Retention:
    """Stretches with and without the hand, until the backlog is done."""
    result = Retention(rows)
    show.step(f"sending {records:,} orders")
    feed = site.feed(records)
    with site.job(SUBJECT.name, feed.topic) as job:
        command = SUBJECT.prepare(job, site.folder)
        show.step(f"filling the inbox with {rows:,} expired rows")
        database.connected(job.database, lambda connection: _fill(connection, rows))
        settings = _settings(site, job, pace)
        with Running(site.keeper, command, site.folder / f"{job.group}.log") as running:
            with _Turning(settings, result) as hand:
                _alternate(site, job, running, hand, result, records, show)
            running.stop()
        show.step("judging")
        pairs, _ = site.cluster.read(job.output, PARTITIONS)
        found = database.rows(job.database)
        inbox = None if found.inbox is None else found.inbox - (rows - result.deleted)
        result.wrong = check.judge(feed.orders, found.reservations, pairs, found.stock, inbox)
    if not result.with_hand or not result.without_hand:
        result.wrong.append("the backlog was done before there was a stretch of both kinds: send more --records")
    if not result.wrong:
        show.say(
            f"{result.share:.3f} × the rate without it, {result.deleted:,} rows deleted in {result.steps:,} steps of at"
            f" most {result.longest_step_ms:.0f} ms; longest wait {result.longest_wait_ms:.0f} ms"
        )
    return result


def cycles(site: Site, result: Retention, number: int, rows: int, show: Show) -> None:
    """In each cycle as many rows come as expire, and those of two cycles stay. Only the present is made up."""
    feed = site.feed(PARTITIONS)  # a record in each partition, which nobody reads
    with site.job("cycles", feed.topic) as job:
        SUBJECT.prepare(job, site.folder)
        settings = _settings(site, job, 100)
        site.server.set({"autovacuum_naptime": "1s"})  # hours lie between rounds, here seconds
        cluster = Cluster(settings.kafka, settings.consumer)

        async def turn(connection: Connection) -> None:
            await connection.execute("SELECT pg_reload_conf()")
            topic = cluster.topics([feed.topic])[feed.topic]
            await connection.execute(LEDGER, job.group, feed.topic, topic.id)
            for cycle in range(1, number + 1):
                show.step(f"cycle {cycle} of {number}")
                result.cycles.append(await _cycle(connection, settings, cluster, cycle, number, rows))
                one = result.cycles[-1]
                show.say(f"cycle {cycle:>2}: {one.rows:>9,} rows, {one.heap / 1e6:.1f} + {one.index / 1e6:.1f} MB")

        try:
            database.connected(job.database, turn)
        finally:
            cluster.close()


async def _cycle(connection: Connection, settings: Settings, cluster: Cluster, cycle: int, of: int, rows: int) -> Cycle:
    assert settings.retention.span is not None
    half = settings.retention.span / 2
    present = await connection.fetchval("SELECT clock_timestamp()") - half * (of - cycle)
    await connection.execute(OLD_ROWS, rows, present - half, half, timeout=None)
    await connection.execute(NOTE, present)
    vacuums = await connection.fetchval(VACUUMS)
    outcome = await Hand(settings, connection, cluster).go_round()
    if not isinstance(outcome, Done):
        raise BenchError(outcome.reason)
    deadline = time.monotonic() + STANDSTILL_SECONDS
    while outcome.deleted and not await connection.fetchval(CLEARED, vacuums):
        if time.monotonic() > deadline:
            raise BenchError(f"no autovacuum within {STANDSTILL_SECONDS:g} s after {outcome.deleted:,} rows went")
        await asyncio.sleep(POLL_SECONDS)
    sizes = await connection.fetchrow(SIZES)
    assert sizes is not None
    return Cycle(cycle, sizes["rows"], sizes["heap"], sizes["index"])


def _settings(site: Site, job: Job, pace: int) -> Settings:
    return load(site.folder / f"{job.group}.toml", {"PROCESSOR_RETENTION__PACE": str(pace)})


async def _fill(connection: Connection, rows: int) -> None:
    month_ago = await connection.fetchval("SELECT clock_timestamp() - interval '30 days'")
    await connection.execute(OLD_ROWS, rows, month_ago, timedelta(days=20), timeout=None)
    await connection.execute(NOTE, month_ago + timedelta(days=29))
    await connection.execute("VACUUM (FREEZE, ANALYZE) inbox")


def _alternate(
    site: Site, job: Job, running: Running, hand: _Turning, result: Retention, records: int, show: Show
) -> None:
    """Switch the hand on and off, and take the rate of each stretch between."""

    def visible() -> int:
        if running.ended() is not None:
            raise BenchError(f"it ended: {running.last_words()}")
        return site.cluster.ends(job.output, PARTITIONS)

    show.step("the service works off a backlog")
    _wait(lambda: visible() > records * WARM_UP, "the first outputs")
    turns = 0
    while True:
        beside = (turns % 2 == 0) == (turns // 2 % 2 == 0)  # one pair begins with the hand, the next ends with it
        turns += 1
        began, done = time.monotonic(), visible()
        hand.turn(on=beside)
        time.sleep(STRETCH_SECONDS)
        hand.turn(on=False)
        now = visible()
        rate = (now - done) / (time.monotonic() - began)
        show.progress(now, records)
        if now >= records * STEADY_UNTIL:
            break
        (result.with_hand if beside else result.without_hand).append(rate)
    _wait(lambda: visible() >= records, "the last outputs")


def _wait(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + STANDSTILL_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise BenchError(f"not within {STANDSTILL_SECONDS:g} s: {what}")
        time.sleep(POLL_SECONDS)


class _Turning:
    """The hand, in a thread with an event loop of its own; and one that looks who waits for it."""

    def __init__(self, settings: Settings, result: Retention) -> None:
        self._settings = settings
        self._result = result
        self._on = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._over = threading.Event()
        self._pid = 0
        self._failed: BaseException | None = None
        self._threads = [threading.Thread(target=self._run, args=[work]) for work in (self._go, self._watch)]

    def __enter__(self) -> Self:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def turn(self, *, on: bool) -> None:
        """Let it go, or wait until it has stopped."""
        if self._failed is not None:
            raise BenchError(f"the hand has failed: {self._failed}")
        if on:
            self._idle.clear()
            self._on.set()
        else:
            self._on.clear()
            self._idle.wait(STANDSTILL_SECONDS)

    def _run(self, work: Callable[[Connection], Awaitable[None]]) -> None:
        try:
            database.connected(self._settings.database.url.get_secret_value(), work)
        except BaseException as error:  # the other thread reports it
            self._failed = error
            self._idle.set()

    async def _go(self, connection: Connection) -> None:
        self._pid = connection.get_server_pid()
        cluster = Cluster(self._settings.kafka, self._settings.consumer)

        def moved(_done: int, _pages: int) -> None:
            self._result.steps += 1

        try:
            while not self._over.is_set():
                if not self._on.is_set():
                    self._idle.set()
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                hand = Hand(
                    self._settings,
                    connection,
                    cluster,
                    behind=lambda: True,
                    stopped=lambda: not self._on.is_set(),
                    moved=moved,
                )
                outcome = await hand.go_round(resume=True)
                if not isinstance(outcome, Done):
                    raise BenchError(outcome.reason)
                self._result.deleted += outcome.deleted
                self._result.longest_step_ms = max(self._result.longest_step_ms, outcome.longest * 1000)
        finally:
            cluster.close()

    async def _watch(self, connection: Connection) -> None:
        """Note how long anybody waits for a lock that the hand holds."""
        since: dict[int, float] = {}
        while not self._over.is_set():
            now = time.monotonic()
            waiting = {row["pid"] for row in await connection.fetch(WAITING, self._pid)} if self._on.is_set() else set()
            since = {pid: since.get(pid, now) for pid in waiting}
            for began in since.values():
                self._result.longest_wait_ms = max(
                    self._result.longest_wait_ms, (time.monotonic() - began + SAMPLE_SECONDS) * 1000
                )
            await asyncio.sleep(SAMPLE_SECONDS)
