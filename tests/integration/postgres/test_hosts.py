"""URLs that name several hosts: one of two servers takes writes, and nobody says which."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from processor.stack import Stack
from processor.stack.kafka import Broker
from tests.integration.conftest import MakeBench
from tests.support import command, sql
from tests.support.bench import Bench, Sent

ROLE = "roamer"
LOGIN = f"{ROLE}:roamer-hunter2"
CREATE_ROLE = f"CREATE ROLE {ROLE} LOGIN SUPERUSER PASSWORD 'roamer-hunter2'"
DEAD = "127.0.0.1:1"


class PostgresAlone(Stack):
    @property
    def brokers(self) -> list[Broker]:
        return []


@pytest.fixture(scope="module")
def other_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a second Postgres."""
    alone = PostgresAlone(tmp_path_factory.mktemp("other") / "stack")
    alone.up(guarded=True)
    sql.execute(alone.postgres_url, CREATE_ROLE)
    yield alone.postgres_url
    alone.down(purge=True)


@pytest.fixture
def reader(other_server: str, database: str) -> Iterator[str]:
    """The host of a server that has a database of the same name, and takes no writes."""
    name = urlsplit(database).path[1:]
    sql.execute(other_server, f"CREATE DATABASE {name}")
    sql.execute(other_server, f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    sql.execute(database, CREATE_ROLE)
    yield host(other_server)
    sql.execute(database, f"DROP OWNED BY {ROLE}; DROP ROLE {ROLE}")
    sql.execute(other_server, f"DROP DATABASE {name} WITH (FORCE)")


def host(url: str) -> str:
    return urlsplit(url).netloc.rpartition("@")[2]


def url_of(bench: Bench, *hosts: str) -> str:
    return f"postgresql://{LOGIN}@{','.join(hosts)}{urlsplit(bench.database).path}"


async def test_the_host_that_takes_writes_is_found_among_dead_ones_and_readers(bench: MakeBench, reader: str) -> None:
    b = bench()
    url = url_of(b, DEAD, reader, host(b.database))
    b.send([Sent({"what": "x"}, id="m")])
    await b.run_until_done(PROCESSOR_DATABASE__URL=url)
    assert await b.effects() == ["x"]
    migrated = command.processor(Path.cwd(), "migrate", str(b.config), environ={"PROCESSOR_DATABASE__URL": url})
    assert (migrated.returncode, migrated.stdout) == (0, "nothing to apply: the database is as this code needs it\n")
    listed = command.processor(Path.cwd(), "dlq", "list", str(b.config), environ={"PROCESSOR_DATABASE__URL": url})
    assert (listed.returncode, listed.stderr) == (0, "no message matches\n")
    checked = command.processor(
        Path.cwd(), "check", str(b.config), "--connect", environ={"PROCESSOR_DATABASE__URL": url}
    )
    assert f"as {ROLE}" in checked.stdout


@pytest.mark.parametrize("verb", [("migrate",), ("dlq", "list"), ("run",)])
def test_where_no_host_takes_writes_each_is_said_to_be_what_it_is(
    bench: MakeBench, reader: str, verb: tuple[str, ...]
) -> None:
    b = bench()
    environ = {"PROCESSOR_DATABASE__URL": url_of(b, DEAD, reader)}
    done = command.processor(Path.cwd(), *verb, str(b.config), environ=environ)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"{reader}: is read-only" in line
    assert f"; {reader}" in line.partition(DEAD)[2], "and so is the one before it"
    assert "hunter2" not in line


def test_check_says_that_the_only_host_is_read_only(bench: MakeBench, reader: str) -> None:
    b = bench()
    environ = {"PROCESSOR_DATABASE__URL": url_of(b, reader)}
    done = command.processor(Path.cwd(), "check", str(b.config), "--connect", environ=environ)
    assert done.returncode == 1
    assert f"{reader}: is read-only" in done.stdout
