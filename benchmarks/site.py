"""The servers that all subjects share, and what is made on them for each run."""

from __future__ import annotations

import platform
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks import database, kafka, workload
from benchmarks.errors import BenchError
from benchmarks.job import Job
from benchmarks.processes import Keeper
from benchmarks.workload import Feed
from processor.stack.display import display

if TYPE_CHECKING:
    from processor.stack import Stack

PARTITIONS = 4

# The least that a dedicated server would have; Postgres' defaults suit very small machines.
POSTGRES_SETTINGS = {
    "shared_buffers": "1GB",
    "max_wal_size": "4GB",
    "min_wal_size": "1GB",  # keeps what Server.settle_in makes
    "checkpoint_timeout": "15min",
    "effective_io_concurrency": "16",
}
# All workers of a group get their partitions at once, as with Kafka's default of 3 s.
BROKER_SETTINGS = {"group.initial.rebalance.delay.ms": "1000"}


@dataclass(frozen=True, slots=True)
class Filled:
    """A database to start from, with inbox rows of this group."""

    database: str
    group: str
    inbox_rows: int


@dataclass(slots=True)
class Site:
    cluster: kafka.Cluster
    server: database.Server
    keeper: Keeper
    folder: Path
    pids: dict[str, list[int]]
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    feeds: dict[tuple[int, ...], Feed] = field(default_factory=dict)

    def feed(
        self,
        records: int,
        *,
        partitions: int = PARTITIONS,
        size: int = workload.VALUE_BYTES,
        poison_one_in: int = 0,
        keys: int = 0,
    ) -> Feed:
        """The input topic with this many records, filled on first use and shared by all subjects."""
        key = (records, partitions, size, poison_one_in, keys)
        if key not in self.feeds:
            name = f"orders-{'-'.join(map(str, key))}-{uuid.uuid4().hex[:6]}"
            self.cluster.create(name, partitions)
            servers = self.cluster.bootstrap_servers
            self.feeds[key] = workload.fill(servers, name, partitions, records, size, poison_one_in, keys)
        return self.feeds[key]

    @contextmanager
    def topic(self, name: str, partitions: int = PARTITIONS) -> Iterator[str]:
        """An empty input topic, for a stream that is sent while it is read."""
        topic = f"orders-{name}-{uuid.uuid4().hex[:6]}"
        self.cluster.create(topic, partitions)
        try:
            yield topic
        finally:
            self.cluster.delete(topic)

    @contextmanager
    def job(self, name: str, topic: str, filled: Filled | None = None) -> Iterator[Job]:
        """A new group, output topic and database; with `filled`, the group and the database of that one."""
        group = filled.group if filled else f"bench-{name}-{uuid.uuid4().hex[:8]}"
        output = f"{group}-out-{uuid.uuid4().hex[:6]}"
        self.cluster.create(output, PARTITIONS, message_timestamp_type="LogAppendTime")
        if filled:
            self.cluster.forget_group(group)
        try:
            url = self.server.create(group, template=filled.database if filled else None)
            yield Job(self.cluster.bootstrap_servers, url, topic, output, group)
        finally:
            self.server.drop(group)
            self.cluster.delete(output)


@contextmanager
def of_own(stack: Stack, *, quiet: bool = True) -> Iterator[Site]:
    """Servers for this run alone, deleted afterwards, also if we are killed."""
    if any(server.state != "down" for server in stack.status()):
        raise BenchError(
            f"a stack is already running in {stack.directory}: another benchmark? name another --directory"
        )
    with display(quiet=quiet) as progress:
        stack.up(guarded=True, display=progress)
    try:
        database.Server(stack.postgres_url).set(POSTGRES_SETTINGS)
        stack.postgres.restart()
        with shared(stack) as site:
            site.server.settle_in()
            site.settings = {"postgres": dict(POSTGRES_SETTINGS), "broker": dict(BROKER_SETTINGS)}
            yield site
    finally:
        stack.down(purge=True)


@contextmanager
def shared(stack: Stack, folder: Path | None = None) -> Iterator[Site]:
    """Servers that the caller starts and stops."""
    folder = folder or stack.directory / "bench"
    shutil.rmtree(folder, ignore_errors=True)  # logs of an earlier session
    folder.mkdir(parents=True)
    postgres = stack.postgres.pid
    assert postgres is not None
    with Keeper() as keeper:
        yield Site(
            kafka.Cluster(stack.bootstrap_servers),
            database.Server(stack.postgres_url),
            keeper,
            folder,
            {"postgres": [postgres], "broker": [broker.pid for broker in stack.brokers if broker.pid is not None]},
        )


def machine(site: Site) -> dict[str, Any]:
    """The machine that the figures belong to: those of another one do not compare."""
    return {
        "cpu": _cpu_model(),
        "cores": psutil.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "postgres": site.server.version(),
    }


def _cpu_model() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
