"""One Kafka and one Postgres for the whole run; each test has its own topics, group and database."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Protocol

import pytest
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from processor.postgres import migrate
from processor.stack import Stack
from tests.support import deployments, servers, sql
from tests.support.deployments import Deployment
from tests.support.processes import Process
from tests.support.reaper import Reaper
from tests.support.servers import Servers

ADMIN_SECONDS = 30.0
AMPLE_STOCK = 2_000_000_000
SKUS = 10


class Topics(Protocol):
    def __call__(
        self,
        name: str = "topic",
        *,
        partitions: int = 1,
        stack: Servers | None = None,
        exact: bool = False,
        config: dict[str, str] | None = None,
    ) -> str: ...


class Deploy(Protocol):
    def __call__(
        self,
        *,
        handler: str = "reserve",
        protocol: str = "classic",
        partitions: int = 4,
        stack: Servers | None = None,
        database: str | None = None,
        dead_letters: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> Deployment: ...


class Start(Protocol):
    def __call__(self, deployment: Deployment, *arguments: str, failpoints: str = "", **environ: str) -> Process: ...


def pytest_configure(config: pytest.Config) -> None:
    """In a parallel run, the process that hands out the tests looks after the one stack they share."""
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        keeping = ExitStack()
        keeping.enter_context(servers.shared())
        config.add_cleanup(keeping.close)


def unique(prefix: str) -> str:
    return f"{prefix}-{uuid.uuid4().hex[:8]}"


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    """Kafka and Postgres, by TEST_STACK; see tests/support/servers.py."""
    with servers.running(tmp_path_factory.mktemp("stack") / "stack") as running:
        yield running


@pytest.fixture
def local_stack(stack: Servers) -> Stack:
    """The same, for tests that use Kafka's tools or do things to the servers' processes."""
    if not isinstance(stack, Stack):
        pytest.skip("needs TEST_STACK=embedded")
    return stack


class Databases:
    """Databases on one server: empty ones, and migrated ones cloned from a template in milliseconds."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._template: str | None = None
        self._made: list[str] = []

    def empty(self) -> str:
        return self._create()

    def migrated(self) -> str:
        if self._template is None:
            template = self._create()
            sets = [
                migrate.read_set(migrate.core_migrations(), migrate.CORE),
                migrate.read_set(deployments.MIGRATIONS, migrate.set_name(deployments.MIGRATIONS)),
            ]
            sql.connected(template, lambda connection: migrate.apply(connection, sets))
            self._template = template.rpartition("/")[2]
        return self._create(f"TEMPLATE {self._template}")

    def drop(self, url: str) -> None:
        name = url.rpartition("/")[2]
        self._made.remove(name)
        sql.execute(self._url, f"DROP DATABASE {name} WITH (FORCE)")

    def drop_all(self) -> None:
        for name in list(self._made):
            self.drop(sql.with_database(self._url, name))

    def _create(self, template: str = "") -> str:
        name = f"test_{uuid.uuid4().hex[:12]}"
        sql.execute(self._url, f"CREATE DATABASE {name} {template}")
        self._made.append(name)
        return sql.with_database(self._url, name)


@pytest.fixture(scope="session")
def databases(stack: Servers) -> Iterator[Databases]:
    made = Databases(stack.postgres_url)
    yield made
    made.drop_all()


@pytest.fixture
def empty_database(databases: Databases) -> Iterator[str]:
    """The URL of a database without any table; dropped afterwards."""
    url = databases.empty()
    yield url
    databases.drop(url)


@pytest.fixture
def database(databases: Databases) -> Iterator[str]:
    """The URL of a database with the processor's and the example handlers' tables; dropped afterwards."""
    url = databases.migrated()
    yield url
    databases.drop(url)


@pytest.fixture(scope="session")
def topics(stack: Servers) -> Topics:
    """Creates a topic with a name of its own, or if asked with this one: `topics("orders", partitions=4)`."""
    default = stack

    def create(
        name: str = "topic",
        *,
        partitions: int = 1,
        stack: Servers | None = None,
        exact: bool = False,
        config: dict[str, str] | None = None,
    ) -> str:
        admin = AdminClient({"bootstrap.servers": (stack or default).bootstrap_servers, "log_level": 0})
        topic = name if exact else unique(name)
        admin.create_topics([NewTopic(topic, partitions, 1, config=config or {})])[topic].result(ADMIN_SECONDS)
        return topic

    return create


@pytest.fixture
def deployment(tmp_path: Path, stack: Servers, database: str, topics: Topics) -> Deploy:
    """Creates topics and a configuration of the inventory example on this test's database, with ample stock.

    `settings` are tables and plain settings of the configuration, merged over the short time-outs that tests want;
    `stack` and `database` say where, if it is not the test run's stack and this test's database. With `dead_letters`
    there is a dead-letter topic; else failed messages are rows only. Records in the output topic carry the time at
    which the broker took them.
    """
    default, own = stack, database

    def create(
        *,
        handler: str = "reserve",
        protocol: str = "classic",
        partitions: int = 4,
        stack: Servers | None = None,
        database: str | None = None,
        dead_letters: bool = False,
        settings: dict[str, Any] | None = None,
    ) -> Deployment:
        bootstrap_servers = (stack or default).bootstrap_servers
        database = database or own
        consumer = unique("inventory")
        orders = topics("orders", partitions=partitions, stack=stack)
        results = topics("reservations", partitions=2, stack=stack, config={"message.timestamp.type": "LogAppendTime"})
        tables = deployments.settings(protocol, handler)
        dead_letter_topic = f"{orders}.{consumer}.dlq"
        if dead_letters:
            topics(dead_letter_topic, partitions=2, stack=stack, exact=True)
            tables["failure"]["dead_letter_topic"] = "{topic}.{consumer}.dlq"
        tables["kafka"]["bootstrap_servers"] = bootstrap_servers
        tables["database"]["url"] = database
        config = tmp_path / f"{consumer}.toml"
        deployments.write(config, {"consumer": consumer, "topic": orders}, deployments.merged(tables, settings or {}))
        put_stock(database)
        return Deployment(
            config=config,
            consumer=consumer,
            input_topic=orders,
            output_topic=results,
            database=database,
            bootstrap_servers=bootstrap_servers,
            partitions=partitions,
            dead_letter_topic=dead_letter_topic,
            environment={"TEST_OUTPUT_TOPIC": results},
        )

    return create


def put_stock(database: str) -> None:
    sql.execute(
        database,
        "INSERT INTO stock (sku, on_hand) SELECT 'sku-' || n, $1 FROM generate_series(0, $2) n ON CONFLICT DO NOTHING",
        AMPLE_STOCK,
        SKUS - 1,
    )


@pytest.fixture(scope="session")
def reaper() -> Iterator[Reaper]:
    reaper = Reaper()
    yield reaper
    reaper.close()


@pytest.fixture
def start(reaper: Reaper) -> Iterator[Start]:
    """Starts `processor run`; whatever still runs at the end of the test is killed."""
    started: list[Process] = []

    def run(deployment: Deployment, *arguments: str, failpoints: str = "", **environ: str) -> Process:
        process = Process(deployment, reaper, *arguments, PROCESSOR_FAILPOINTS=failpoints, **environ)
        started.append(process)
        return process

    yield run
    for process in reversed(started):
        process.clean_up()
    for process in started:  # pytest shows it if the test has failed
        print(f"log of process {process.pid}:{process.tail()}")
