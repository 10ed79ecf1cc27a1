"""The oldest servers that the README names: a process dies between the commits, and nothing is lost or doubled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from processor.stack import Stack
from processor.stack.guard import Guard
from tests.conftest import Databases, Deploy, Start
from tests.support import sql
from tests.support.servers import Addresses

OLDEST_KAFKA = "3.7.2"
POSTGRES_15 = Path("/usr/lib/postgresql/15")  # where Debian has it

# In a process of its own: which servers a stack has is read from the environment when the process begins.
UP = "import sys; from processor.stack import Stack; Stack(sys.argv[1]).up()"

Older = Callable[..., Addresses]


@pytest.fixture
def older(local_stack: Stack, tmp_path: Path) -> Iterator[Older]:
    """A stack of its own, as these variables say."""
    with ExitStack() as closing:
        yield lambda **environ: closing.enter_context(_running(tmp_path / "older", environ))


@contextmanager
def _running(folder: Path, environ: dict[str, str]) -> Iterator[Addresses]:
    stack, guard = Stack(folder), Guard(folder)
    try:
        done = subprocess.run(
            [sys.executable, "-c", UP, folder], env=os.environ | environ, capture_output=True, text=True, check=False
        )
        if "cannot download" in done.stderr:
            pytest.skip("its jars are not in the cache, and there is no network")
        assert done.returncode == 0, done.stderr
        yield Addresses(stack.bootstrap_servers, stack.postgres_url)
    finally:
        stack.down(purge=True)
        guard.dismiss()


def survives_a_death_between_the_commits(deployment: Deploy, start: Start, servers: Addresses) -> None:
    databases = Databases(servers.postgres_url)
    deployed = deployment(stack=servers, database=databases.migrated(), dead_letters=True)
    feed = deployed.feed()
    feed.send(500)
    doomed = start(deployed, failpoints="after_postgres_commit=kill@3")
    assert doomed.wait(60) == -signal.SIGKILL, doomed.tail()
    first, second = start(deployed), start(deployed)
    first.wait_for("partition_ready")
    second.wait_for("partition_ready")
    feed.send(500)
    deployed.verifier().assert_exactly_once()
    for process in (first, second):
        process.terminate()
        assert process.wait() == 0, process.tail()


def test_kafka_3_7_serves_as_the_newest_does(older: Older, deployment: Deploy, start: Start) -> None:
    servers = older(PROCESSOR_STACK_KAFKA_VERSION=OLDEST_KAFKA)
    survives_a_death_between_the_commits(deployment, start, servers)


def test_postgres_15_serves_as_the_newest_does(older: Older, deployment: Deploy, start: Start) -> None:
    if not POSTGRES_15.exists():
        pytest.skip("no PostgreSQL 15 on this machine: apt install postgresql-15")
    servers = older(PROCESSOR_STACK_POSTGRES=str(POSTGRES_15))
    assert str(sql.value(servers.postgres_url, "SHOW server_version")).startswith("15.")
    survives_a_death_between_the_commits(deployment, start, servers)
