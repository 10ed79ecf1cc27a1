"""Kafka and Postgres for a test run: started here, started by Docker, or already there.

`TEST_STACK` says which: `embedded` (default) needs only the Python packages of the project; `docker` needs a
Docker engine; `external` takes PROCESSOR_KAFKA__BOOTSTRAP_SERVERS and PROCESSOR_DATABASE__URL.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

import pytest

from processor.stack import Stack
from processor.stack.guard import Guard

SHARED = "TEST_STACK_FOLDER"
ADDRESSES = "addresses.json"

KAFKA_IMAGE = "apache/kafka:4.3.1"
POSTGRES_IMAGE = "postgres:18"

# A dead member is noticed after this with the consumer group protocol; with the classic one, tests say it themselves.
SESSION_TIMEOUT_MS = 1500
BROKER_SETTINGS = {
    "group.min.session.timeout.ms": "1000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.session.timeout.ms": str(SESSION_TIMEOUT_MS),
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "200",
    "group.initial.rebalance.delay.ms": "0",
    # A transaction whose producer hangs is ended soon after its timeout, not up to 10 s later.
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "250",
}


class Servers(Protocol):
    """What every kind of stack tells."""

    @property
    def bootstrap_servers(self) -> str: ...
    @property
    def postgres_url(self) -> str: ...
    def environment(self) -> dict[str, str]: ...


@dataclass(frozen=True)
class Addresses:
    """Servers that somebody else looks after."""

    bootstrap_servers: str
    postgres_url: str

    @property
    def internal_bootstrap_servers(self) -> str:
        return self.bootstrap_servers

    @property
    def client_settings(self) -> dict[str, str]:
        return {}

    def environment(self) -> dict[str, str]:
        return {
            "PROCESSOR_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap_servers,
            "PROCESSOR_DATABASE__URL": self.postgres_url,
        }


def _kind() -> str:
    return os.environ.get("TEST_STACK") or "embedded"


@contextmanager
def running(folder: Path) -> Iterator[Servers]:
    kind = _kind()
    ways: dict[str, Callable[[], AbstractContextManager[Servers]]] = {
        "embedded": lambda: _joined(Path(os.environ[SHARED])) if SHARED in os.environ else embedded(folder),
        "docker": lambda: _joined_containers(Path(os.environ[SHARED])) if SHARED in os.environ else _docker(),
        "external": _external,
    }
    if kind not in ways:
        raise pytest.UsageError(f"TEST_STACK={kind}: must be one of {', '.join(ways)}")
    with ways[kind]() as servers:
        yield servers


@contextmanager
def shared() -> Iterator[None]:
    """One stack for all processes of a parallel run; it ends with this block.

    The first process that needs it starts it, but containers end with the process that has started them: those are
    started here.
    """
    with TemporaryDirectory(prefix="processor-tests-") as folder:
        keep = _keep_containers if _kind() == "docker" else _keep_stack
        os.environ[SHARED] = folder
        try:
            with keep(Path(folder)):
                yield
        finally:
            del os.environ[SHARED]


@contextmanager
def _keep_stack(folder: Path) -> Iterator[None]:
    guard = Guard(folder / "stack")
    try:
        yield
    finally:
        Stack(folder / "stack").down(purge=True)
        guard.dismiss()


@contextmanager
def embedded(
    folder: Path, overrides: Mapping[str, str] | None = None, *, brokers: int | None = None
) -> Iterator[Stack]:
    """Taken down in any case, also when this process is killed; its logs stay for a look."""
    stack = Stack(folder, brokers, overrides={**BROKER_SETTINGS, **(overrides or {})})
    stack.up(guarded=True)
    try:
        yield stack
    finally:
        stack.down(purge=True, keep_logs=True)


@contextmanager
def _joined(folder: Path) -> Iterator[Stack]:
    stack = Stack(folder / "stack", overrides=BROKER_SETTINGS)
    stack.up()
    yield stack


@contextmanager
def _keep_containers(folder: Path) -> Iterator[None]:
    with _docker() as addresses:
        (folder / ADDRESSES).write_text(json.dumps(asdict(addresses)))
        yield


@contextmanager
def _joined_containers(folder: Path) -> Iterator[Addresses]:
    yield Addresses(**json.loads((folder / ADDRESSES).read_text()))


@contextmanager
def _external() -> Iterator[Addresses]:
    try:
        yield Addresses(
            os.environ["PROCESSOR_KAFKA__BOOTSTRAP_SERVERS"],
            os.environ["PROCESSOR_DATABASE__URL"],
        )
    except KeyError as error:
        raise pytest.UsageError(f"TEST_STACK=external needs {error.args[0]}") from None


@contextmanager
def _docker() -> Iterator[Addresses]:
    from testcontainers.core.container import DockerContainer
    from testcontainers.core.wait_strategies import ExecWaitStrategy, LogMessageWaitStrategy

    from processor.stack import ports

    # The broker tells clients where to find it, so its port has to be known before it starts.
    (port,) = ports.choose(("kafka",), {}, set()).values()
    settings = BROKER_SETTINGS | {
        "node.id": "1",
        "process.roles": "broker,controller",
        "controller.quorum.voters": "1@localhost:9093",
        "controller.listener.names": "CONTROLLER",
        "listeners": "PLAINTEXT://:9092,CONTROLLER://:9093",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
        "auto.create.topics.enable": "false",
        "offsets.topic.replication.factor": "1",
        "offsets.topic.num.partitions": "4",
        "transaction.state.log.replication.factor": "1",
        "transaction.state.log.min.isr": "1",
        "transaction.state.log.num.partitions": "4",
        "log.dirs": "/tmp/kafka",
    }
    kafka = DockerContainer(KAFKA_IMAGE).with_bind_ports(9092, port)
    for name, value in settings.items():
        kafka = kafka.with_env(f"KAFKA_{name.replace('.', '_').upper()}", value)
    kafka = kafka.waiting_for(LogMessageWaitStrategy("Kafka Server started"))
    postgres = DockerContainer(POSTGRES_IMAGE).with_exposed_ports(5432).with_env("POSTGRES_PASSWORD", "test")
    # By TCP: the server that prepares the data, and says that it is ready, too, has a socket only.
    postgres = postgres.waiting_for(ExecWaitStrategy(["pg_isready", "-h", "127.0.0.1", "-U", "postgres"]))
    with kafka, postgres:
        host, mapped = postgres.get_container_host_ip(), postgres.get_exposed_port(5432)
        yield Addresses(f"127.0.0.1:{port}", f"postgresql://postgres:test@{host}:{mapped}/postgres")
