"""Replays: how fast they pass what is done, what one costs the service beside it, and that SIGKILL costs nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any

import psutil

from benchmarks import database, processes, stats, workload
from benchmarks.errors import BenchError
from benchmarks.job import Job
from benchmarks.measure import complete
from benchmarks.pace import Stream
from benchmarks.processes import Command, Running
from benchmarks.show import Show
from benchmarks.site import PARTITIONS, Site
from benchmarks.subjects import BATCH, Processor
from benchmarks.workload import Feed

KNOWN, BESIDE, KILLED = "known", "beside", "killed"
NAMES = (KNOWN, BESIDE, KILLED)
# Figures with a threshold (verdicts.py).
MEMORY = "memory of a replay of what is done, at most"
SLOWER = "p99 beside a replay / alone"

# The handlers' outputs must not depend on the state of the tables, so that a run can be compared with another one.
LATE = Processor("late", "begins behind the last record", settings={"kafka": {"start": "latest"}})
PER_SECOND = 500
REPLAY_RATE = 5_000
BACKLOG_RECORDS = 100_000
WARM_UP_SECONDS = 2.0
WAIT_SECONDS = 300.0
POLL_SECONDS = 0.05
KILLS = 3

# The promise is the processor's; and what is processed again under another scope writes its rows again.
NOT_UNIQUE = "ALTER TABLE reservations DROP CONSTRAINT reservations_pkey"

DONE = """
    SELECT sum(l.next_offset - r.first_offset)::float8 / sum(r.end_offset - r.first_offset)
    FROM replay_ranges r JOIN ledger l USING (partition_id)
"""


@dataclass(slots=True)
class Figure:
    """One number, or what was wrong instead."""

    name: str
    value: float | None
    unit: str
    wrong: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return f"WRONG: {'; '.join(self.wrong)}" if self.wrong else f"{self.value:,.1f} {self.unit}"


def take_turns(site: Site, names: list[str], records: int, seconds: float, repeat: int, show: Show) -> list[Figure]:
    found: list[Figure] = []
    if KNOWN in names:
        found += known(site, records, show)
    if BESIDE in names:
        found += beside(site, seconds, repeat, show)
    if KILLED in names:
        found += killed(site, min(records, BACKLOG_RECORDS), show)
    for figure in found:
        show.say(f"{figure.name}: {figure.text}")
    return found


def known(site: Site, records: int, show: Show) -> list[Figure]:
    """Everything is done: how fast a replay finds that out, and how much memory it takes."""
    feed = site.feed(records)
    with site.job("replay-known", feed.topic) as job:
        show.step(f"{records:,} records are processed by the service")
        complete(site, BATCH, job, records, show.progress)
        show.step("all of them once more")
        with _replay(site, BATCH, job, "start", "--all", "--execute") as running:
            highest = _highest_memory(running)
            report = _report(site, job)
        wrong = [] if report["skipped"] == records else [f"{report['skipped']} of {records} skipped"]
        times = {one["event"]: datetime.fromisoformat(one["at"]) for one in report["history"]}
        took = (times["finished"] - times["started"]).total_seconds()
        return [
            Figure("replay of what is done", records / took, "records/s", wrong),
            Figure(MEMORY, highest / 2**20, "MB", wrong),
        ]


def beside(site: Site, seconds: float, repeat: int, show: Show) -> list[Figure]:
    """The service's latency without and with a replay beside it, in turns."""
    found: dict[bool, list[float]] = {False: [], True: []}
    with site.topic("replay") as topic, site.job("replay-beside", topic) as job:
        orders = workload.orders(10_000_000)
        service = Running(site.keeper, BATCH.prepare(job, site.folder), site.folder / f"{job.group}.log")
        with service, Stream(site, job) as stream:
            show.step("a backlog, and the service works it off")
            for _ in range(BACKLOG_RECORDS):
                stream.send(*next(orders))
            stream.wait(WAIT_SECONDS)
            for number in range(2 * repeat):
                replaying = number % 2 == 1
                show.step(f"{PER_SECOND} msg/s {'beside a replay' if replaying else 'alone'}")
                name = f"beside-{number}"
                arguments = ("start", "--all", "--rate", str(REPLAY_RATE), "--name", name, "--execute")
                running = _replay(site, BATCH, job, *arguments) if replaying else None
                try:
                    stream.pace((next(orders) for _ in range(int(PER_SECOND * WARM_UP_SECONDS))), PER_SECOND)
                    before = set(stream.sent)
                    stream.pace((next(orders) for _ in range(int(PER_SECOND * seconds))), PER_SECOND)
                    if running is not None and running.ended() is not None:
                        raise BenchError(f"the replay ended before the measurement: {running.last_words()}")
                    stream.wait()
                    found[replaying].append(stats.percentile(stream.delays(stream.sent.keys() - before), 99))
                finally:
                    if running is not None:
                        running.stop()
                        running.__exit__(None, None, None)
    alone, with_replay = (sorted(found[one])[len(found[one]) // 2] for one in (False, True))
    return [
        Figure(f"p99 at {PER_SECOND} msg/s alone", alone, "ms"),
        Figure(f"p99 beside a replay of {REPLAY_RATE} records/s", with_replay, "ms"),
        Figure(SLOWER, with_replay / alone, "×"),
    ]


def killed(site: Site, records: int, show: Show) -> list[Figure]:
    """Each mode that writes, killed three times: its rows and outputs are those of one that was left alone."""
    feed = site.feed(records)
    return [_killed(site, mode, feed, show) for mode in ("missing", "re-emit", "re-apply")]


def _killed(site: Site, mode: str, feed: Feed, show: Show) -> Figure:
    show.step(f"{mode}, killed {KILLS} times")
    times = 1 if mode == "missing" else 2
    with site.job(f"replay-{mode}", feed.topic) as job:
        database.connected(job.database, lambda connection: connection.execute(NOT_UNIQUE))
        subject = LATE if mode == "missing" else BATCH
        if mode == "missing":
            _begin_at_the_end(site, job)
        else:
            complete(site, subject, job, len(feed), show.progress)
        scope = ("--scope", "again") if mode == "re-apply" else ()
        arguments = ("start", "--all", "--mode", mode, "--name", "again", *scope, "--execute")
        for number in range(1, KILLS + 1):
            with _replay(site, subject, job, *arguments) as running:
                _wait_for(partial(_has_done, job, number / (KILLS + 2)), running)
                running.kill()
            arguments = ("resume", "again")
        with _replay(site, subject, job, *arguments) as running:
            _wait_for(lambda: running.ended() is not None, None)
        report = _report(site, job)
        pairs, _ = site.cluster.read(job.output, PARTITIONS)
        rows = database.rows(job.database)
        wrong = []
        expected_rows = len(feed) * (1 if mode == "re-emit" else times)
        for what, is_, should in (
            ("rows", len(list(rows.reservations)), expected_rows),
            ("outputs", len(pairs), len(feed) * times),
            ("processed", report["processed"], len(feed)),
        ):
            if is_ != should:
                wrong.append(f"{is_} {what} instead of {should}")
        if {pair[0] for pair in pairs} != feed.orders.keys():
            wrong.append("outputs are missing")
        return Figure(f"{mode} of {len(feed):,} records, killed {KILLS} times", 0.0, "faults", wrong)


def _begin_at_the_end(site: Site, job: Job) -> None:
    with Running(site.keeper, LATE.prepare(job, site.folder), site.folder / f"{job.group}.log") as running:
        _wait_for(lambda: _taken_over(job), running)
        running.stop()


def _taken_over(job: Job) -> bool:
    count = database.connected(job.database, lambda connection: connection.fetchval("SELECT count(*) FROM ledger"))
    return bool(count == PARTITIONS)


def _replay(site: Site, subject: Processor, job: Job, verb: str, *arguments: str) -> Running:
    command = _command(site, subject, job, verb, *arguments, "-o", "json")
    return Running(site.keeper, command, site.folder / f"{job.group}-replay.log")


def _command(site: Site, subject: Processor, job: Job, verb: str, *arguments: str) -> Command:
    config = site.folder / f"{job.group}.toml"
    config.write_text(subject.config(job))
    words = [sys.executable, "-m", "processor", "replay", verb, str(config), *arguments]
    return Command(words, job.variables(site.folder))


def _report(site: Site, job: Job) -> dict[str, Any]:
    """What `replay show` says of the only replay."""
    name = database.connected(job.database, lambda connection: connection.fetchval("SELECT name FROM replays"))
    config = site.folder / f"{job.group}.toml"
    words = [sys.executable, "-m", "processor", "replay", "show", str(config), name, "-o", "json"]
    found: dict[str, Any] = json.loads(processes.call(Command(words, job.variables(site.folder))))
    return found


def _has_done(job: Job, share: float) -> bool:
    return float(database.connected(job.database, lambda connection: connection.fetchval(DONE)) or 0) >= share


def _highest_memory(running: Running) -> int:
    """Watch it until it ends; returns the most bytes that it held."""
    process, highest = psutil.Process(running.pid), 0
    deadline = time.monotonic() + WAIT_SECONDS
    while running.ended() is None:
        if time.monotonic() > deadline:
            raise BenchError("the replay does not end")
        with suppress(psutil.NoSuchProcess):
            highest = max(highest, process.memory_info().rss)
        time.sleep(POLL_SECONDS)
    return highest


def _wait_for(condition: Callable[[], bool], running: Running | None) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        if running is not None and running.ended() is not None:
            raise BenchError(f"the process ended too early: {running.last_words()}")
        if time.monotonic() > deadline:
            raise BenchError("waited too long")
        time.sleep(POLL_SECONDS)
