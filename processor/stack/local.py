"""The stack as a whole: which servers it has, bringing them up together, taking them down.

`up` starts what is missing and leaves the rest alone, so it is also the repair after anything that
killed an earlier run half-way. Brokers and Postgres keep their ports for as long as those are free.
"""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pydantic import BaseModel

from processor.errors import SetupError
from processor.stack import kafka, ports, tls, training
from processor.stack.display import Display
from processor.stack.guard import Guard
from processor.stack.java import Runtime
from processor.stack.kafka import Broker
from processor.stack.postgres import SQL, Postgres
from processor.stack.process import wait_until
from processor.stack.server import START_SECONDS, STOP_SECONDS, Server, ServerEndedError
from processor.stack.state import Shape, State, Store

ATTEMPTS = 3


class ServerStatus(BaseModel, frozen=True):
    name: str
    state: str
    pid: int | None
    address: str | None
    log: Path


class Stack:
    """A Kafka cluster and a Postgres in one directory.

    `brokers`, `sasl` and `tls` belong to the data and cannot change later; None means what the
    directory already has, or one broker without either. `overrides` are broker settings of your own;
    they take effect when a broker starts and are remembered.
    """

    def __init__(
        self,
        directory: Path | str,
        brokers: int | None = None,
        *,
        sasl: bool | None = None,
        tls: bool | None = None,
        overrides: Mapping[str, str] | None = None,
    ) -> None:
        if brokers is not None and brokers < 1:
            raise SetupError(f"a cluster has at least one broker, not {brokers}")
        self.directory = Path(directory).resolve()
        self._wanted = (brokers, sasl, tls)
        self._overrides = None if overrides is None else dict(overrides)
        self._store = Store(self.directory)
        self._guard: Guard | None = None
        self._runtime: Runtime | None = None

    @property
    def brokers(self) -> list[Broker]:
        state = self._store.require()
        return [
            Broker(node, self._store, secured=kafka.is_secured(state), runtime=self._runtime)
            for node in range(1, state.shape.brokers + 1)
        ]

    @property
    def postgres(self) -> Postgres:
        return Postgres(self._store)

    @property
    def bootstrap_servers(self) -> str:
        """Where clients connect; with SASL or TLS the listener that asks for them."""
        state = self._store.require()
        return self._addresses(kafka.CLIENT if kafka.is_secured(state) else kafka.INTERNAL)

    @property
    def internal_bootstrap_servers(self) -> str:
        """The listener between the brokers: always plain text."""
        return self._addresses(kafka.INTERNAL)

    @property
    def client_settings(self) -> dict[str, str]:
        """What a librdkafka client needs besides `bootstrap.servers`; empty without SASL and TLS."""
        state = self._store.require()
        if not kafka.is_secured(state):
            return {}
        found = {"security.protocol": kafka.client_protocol(state)}
        if state.shape.sasl:
            found["sasl.mechanism"] = kafka.MECHANISM
            found["sasl.username"] = kafka.SASL_USER
            found["sasl.password"] = state.sasl_password
        if state.shape.tls:
            found["ssl.ca.location"] = str(self.directory / kafka.TLS_FOLDER / "ca.pem")
        return found

    @property
    def postgres_url(self) -> str:
        password = self._store.require().postgres_password
        return f"postgresql://postgres:{password}@{ports.LOOPBACK}:{self.postgres.ports[SQL]}/postgres"

    def environment(self) -> dict[str, str]:
        """The variables that point the processor at this stack."""
        client = {
            f"PROCESSOR_KAFKA__CLIENT__{name.replace('.', '_').upper()}": value
            for name, value in self.client_settings.items()
        }
        return {
            "PROCESSOR_KAFKA__BOOTSTRAP_SERVERS": self.bootstrap_servers,
            **client,
            "PROCESSOR_DATABASE__URL": self.postgres_url,
        }

    def up(self, *, guarded: bool = False, display: Display | None = None) -> bool:
        """Start what is not running and wait until all of it serves clients; False if it already did.

        `guarded` takes the stack down and deletes its data when this process ends, however it ends:
        for stacks that belong to a test run.
        """
        if guarded and self._guard is None:
            self._guard = Guard(self.directory)
        try:
            with self._store.lock():
                return self._up(display or Display())
        except BaseException:
            if guarded:
                self.down()
            raise

    def down(self, *, purge: bool = False, keep_logs: bool = False) -> bool:
        """Shut down every server, in bounded time; False if none was running.

        `purge` deletes the data as well, and the logs unless they are to be kept.
        """
        if not self.directory.is_dir():
            return False
        with self._store.lock():
            servers = self._servers_to_stop(forgiving=purge)
            for server in servers:
                server.request_stop()
            for server in servers:
                server.wait_ended(STOP_SECONDS)
            if purge:
                self._delete(keep_logs=keep_logs)
        if self._guard is not None:
            self._guard.dismiss()
            self._guard = None
        return bool(servers)

    def status(self) -> list[ServerStatus]:
        """Every server with what it does now; empty where no stack was ever started."""
        try:
            return [] if self._store.read() is None else [self._status(server) for server in self._servers()]
        except SetupError:
            if self._store.read() is not None:
                raise
            return []  # taken down and deleted while we looked

    def kafka_tool(self, tool: str, *arguments: str, timeout: float = 60.0) -> subprocess.CompletedProcess[str]:
        """Run one of Kafka's own command-line tools against this cluster; its errors are in the result."""
        if tool not in kafka.TOOLS:
            raise SetupError(f"no tool `{tool}`: there are {', '.join(kafka.TOOLS)}")
        return kafka.run_tool(
            self.directory,
            self._runtime or self._find_runtime(Display()),
            kafka.TOOLS[tool],
            *("--bootstrap-server", self.internal_bootstrap_servers),
            *arguments,
            timeout=timeout,
        )

    def _up(self, display: Display) -> bool:
        self._prepare_state()
        running = [server for server in self._servers() if server.adopt()]
        for server in running:
            if server.stopped:
                server.cont()
        if len(running) < len(self._servers()):
            self._runtime = self._find_runtime(display)
            if self._runtime.archive is not None and not self._runtime.archive.exists():
                display.begin("preparing quick starts of Kafka (only once)")
                training.train(self._runtime)
            display.begin("starting Kafka and PostgreSQL")
        for attempt in range(1, ATTEMPTS + 1):
            missing = self._assign_ports([server for server in self._servers() if not server.running])
            try:
                self._start(missing)
                break
            except ServerEndedError:
                # Between our look at a port and its use somebody else may take it; then try others.
                stolen = any(
                    not ports.is_free(port)
                    for server in missing
                    if not server.running
                    for port in server.ports.values()
                )
                if attempt == ATTEMPTS or not stolen:
                    raise
        return len(running) < len(self._servers())

    def _prepare_state(self) -> None:
        state = self._store.read()
        brokers, sasl, tls_wanted = self._wanted
        if state is None:
            shape = Shape(brokers=brokers or 1, sasl=bool(sasl), tls=bool(tls_wanted))
            state = State.new(shape)
        else:
            old = state.shape
            shape = Shape(
                brokers=old.brokers if brokers is None else brokers,
                sasl=old.sasl if sasl is None else sasl,
                tls=old.tls if tls_wanted is None else tls_wanted,
            )
            if shape != old:
                raise SetupError(
                    f"the stack in {self.directory} was created with `{old}`, not `{shape}`: "
                    "delete its data first with `processor stack down --purge`"
                )
        if self._overrides is not None:
            state.overrides = self._overrides
        if shape.tls:
            tls.ensure(self.directory / kafka.TLS_FOLDER)
        self._store.write(state)

    def _assign_ports(self, missing: list[Server]) -> list[Server]:
        """Give each missing server its ports; returns what has to be started now.

        The brokers find each other by their controllers' ports. If one of those moves, the brokers
        that still run have to be restarted to learn it.
        """
        moved = False
        with self._store.change() as state:
            for server in missing:
                known = state.server(server.name)
                reserved = {port for other in state.servers.values() for port in other.ports.values()}
                chosen = ports.choose(server.port_names, known.ports, reserved)
                old = known.ports.get(kafka.CONTROLLER)
                moved = moved or (old is not None and old != chosen[kafka.CONTROLLER])
                known.ports = chosen
        if not moved:
            return missing
        for broker in self.brokers:
            broker.terminate()
        return [server for server in self._servers() if not server.running]

    def _start(self, missing: list[Server]) -> None:
        """Launch the missing ones side by side, then wait for all."""
        cancelled = threading.Event()
        servers = self._servers()

        def wait(server: Server) -> None:
            try:
                server.wait_ready(cancelled)
            except SetupError:
                # Without it the others may never get ready: a majority of the brokers is needed.
                cancelled.set()
                raise

        with ThreadPoolExecutor(len(servers)) as pool:
            try:
                list(pool.map(lambda server: server.launch_and_record(), missing))
                list(pool.map(wait, servers))
            except BaseException:
                cancelled.set()
                raise
        everyone = frozenset(broker.node_id for broker in self.brokers)
        if not wait_until(lambda: all(broker.sees(everyone) for broker in self.brokers), START_SECONDS):
            raise SetupError(f"the brokers did not find each other: see {self.directory / 'logs'}")

    def _servers(self) -> list[Server]:
        return [self.postgres, *self.brokers]

    def _servers_to_stop(self, *, forgiving: bool) -> list[Server]:
        try:
            if self._store.read() is None:
                return []
        except SetupError:
            if not forgiving:
                raise
            # The state cannot be read, but what it would describe can still be found by its folders.
            self._store.write(State.new(Shape(brokers=len(list(self.directory.glob("broker-*"))) or 1)))
        return [server for server in self._servers() if server.adopt()]

    def _delete(self, *, keep_logs: bool) -> None:
        state = self._store.read()
        if state is not None and state.postgres_home is not None:
            shutil.rmtree(state.postgres_home, ignore_errors=True)
        folders = [
            *self.directory.glob("broker-*"),
            self.directory / "postgres",
            self.directory / kafka.TLS_FOLDER,
        ]
        if not keep_logs:
            folders.append(self.directory / "logs")
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)
        self._store.path.unlink(missing_ok=True)

    def _status(self, server: Server) -> ServerStatus:
        state = "paused" if server.stopped else "running" if server.running else "down"
        known = server.ports
        port = known.get(kafka.CLIENT) or known.get(kafka.INTERNAL) or known.get(SQL)
        return ServerStatus(
            name=server.name,
            state=state,
            pid=server.pid,
            address=f"{ports.LOOPBACK}:{port}" if port else None,
            log=server.log,
        )

    def _addresses(self, listener: str) -> str:
        return ",".join(f"{ports.LOOPBACK}:{broker.ports[listener]}" for broker in self.brokers)

    def _find_runtime(self, display: Display) -> Runtime:
        return Runtime.find(self.directory / "jars", display)
