"""What brokers and Postgres have in common: one process to start, interrupt, kill and bring back."""

from __future__ import annotations

import shutil
import signal
import tempfile
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from processor.errors import SetupError
from processor.stack import ports
from processor.stack.process import ProcessId, family, find_by_argument, has_ended, is_stopped, send, wait_until
from processor.stack.state import ServerState, Store

START_SECONDS = 60.0
STOP_SECONDS = 10.0
KILL_SECONDS = 10.0
SIGNAL_SECONDS = 5.0


class ServerEndedError(SetupError):
    """It ended while it was starting; `up` tries other ports if that was the reason."""


class Server(ABC):
    """One server of a stack. It holds no state: every question is answered from the state file."""

    port_names: tuple[str, ...]
    stop_signal: signal.Signals

    def __init__(self, name: str, store: Store) -> None:
        self.name = name
        self.store = store
        self.log = store.directory / "logs" / f"{name}.log"

    @abstractmethod
    def launch(self) -> ProcessId:
        """Write its configuration, create its data if there is none, and start the process."""

    @abstractmethod
    def is_ready(self) -> bool:
        """Does it serve clients, and is it really ours?"""

    @abstractmethod
    def marker(self) -> str:
        """An argument on its command line that no other process has."""

    @property
    def ports(self) -> dict[str, int]:
        return self._state().ports

    @property
    def pid(self) -> int | None:
        process = self._process()
        return process.pid if process else None

    @property
    def running(self) -> bool:
        """Whether the process exists; it does while it is stopped by `stop`."""
        return self._process() is not None

    @property
    def stopped(self) -> bool:
        """Whether it is held by `stop` and waits for `cont`."""
        process = self._process()
        return process is not None and is_stopped(process)

    def start(self, *, wait: bool = True) -> None:
        """Start it on its old ports with its old data, and wait until it serves clients.

        `wait=False` is for a cluster without a majority: no broker gets ready before the next one runs.
        """
        with self.store.lock():
            if not self.running:
                taken = [port for port in self.ports.values() if not ports.is_free(port)]
                if taken:
                    raise SetupError(f"{self.name}: port {taken[0]} was taken meanwhile: run `processor stack up`")
                self.launch_and_record()
        if wait:
            self.wait_ready()

    def restart(self) -> None:
        """Shut it down in an orderly way, if it runs, and start it again."""
        self.terminate()
        self.start()

    def terminate(self, seconds: float = STOP_SECONDS) -> None:
        """Shut it down in an orderly way; kill it if that takes too long."""
        self.request_stop()
        self.wait_ended(seconds)

    def kill(self) -> None:
        """SIGKILL, children included, as if the machine had lost it. Returns when all are gone."""
        process = self._process()
        if process is None:
            return
        # Held first, so that it can neither replace its children nor clean up after them.
        send([process], signal.SIGSTOP)
        members = family(process)
        send(members, signal.SIGKILL)
        if not wait_until(lambda: all(map(has_ended, members)), KILL_SECONDS):
            raise SetupError(f"{self.name} (pid {process.pid}) does not end on SIGKILL")

    def stop(self) -> None:
        """SIGSTOP, children included: it keeps its ports and connections and answers nobody."""
        process = self._require_process()
        send([process], signal.SIGSTOP)
        members = family(process)
        send(members[1:], signal.SIGSTOP)
        # The signal is sent at once, but takes effect a moment later.
        wait_until(lambda: all(is_stopped(member) or has_ended(member) for member in members), SIGNAL_SECONDS)

    def cont(self) -> None:
        """SIGCONT: go on after `stop`."""
        members = family(self._require_process())
        send(reversed(members), signal.SIGCONT)
        wait_until(lambda: not any(map(is_stopped, members)), SIGNAL_SECONDS)

    def request_stop(self) -> None:
        """Ask for an orderly shutdown, without waiting for it."""
        process = self._process()
        if process is not None:
            send([process], self.stop_signal)
            # One held by `stop` gets the signal when it goes on.
            send(family(process), signal.SIGCONT)

    def wait_ended(self, seconds: float = STOP_SECONDS) -> None:
        """Wait until the process is gone; kill it when the time is over."""
        if not wait_until(lambda: not self.running, seconds):
            self.kill()

    def wait_ready(self, cancelled: threading.Event | None = None) -> None:
        """Wait until it serves clients."""

        def ready_or_ended() -> bool:
            return not self.running or self.is_ready()

        if wait_until(ready_or_ended, START_SECONDS, cancelled):
            if self.running:
                return
            raise ServerEndedError(f"{self.name} ended while starting: {self._last_words()}")
        if cancelled is None or not cancelled.is_set():
            raise SetupError(f"{self.name} was not ready after {START_SECONDS:.0f} s: see {self.log}")

    def launch_and_record(self) -> None:
        """Start the process and write down which one it is; needs the lock of the store."""
        self.log.parent.mkdir(exist_ok=True)
        process = self.launch()
        with self.store.change() as state:
            state.server(self.name).process = process

    def adopt(self) -> bool:
        """Is it running, even if whoever started it was killed before writing it down?"""
        if self.running:
            return True
        process = find_by_argument(self.marker())
        if process is None:
            return False
        with self.store.change() as state:
            state.server(self.name).process = process
        return True

    def output(self) -> Path:
        """Where its standard output and errors go."""
        return self.log

    def _state(self) -> ServerState:
        return self.store.require().server(self.name)

    def _process(self) -> psutil.Process | None:
        state = self.store.read()
        identity = state.server(self.name).process if state else None
        return identity.find() if identity else None

    def _require_process(self) -> psutil.Process:
        process = self._process()
        if process is None:
            raise SetupError(f"{self.name} is not running")
        return process

    def _last_words(self) -> str:
        for path in dict.fromkeys((self.output(), self.log)):
            try:
                lines = path.read_text(errors="replace").splitlines()
            except FileNotFoundError:
                continue
            errors = [line for line in lines[-60:] if "ERROR" in line or "FATAL" in line or "Error" in line]
            if errors:
                return f"{errors[-1].strip()[:300]} (see {path})"
        return f"see {self.log}"


@contextmanager
def workshop(folder: Path) -> Iterator[Path]:
    """A new folder to make data in, to be renamed when it is whole.

    So that half-made data is never mistaken for data. Its name is new each time: if an earlier run was
    killed, the program it had started may still be at work in the one it made.
    """
    for old in folder.glob("new-*"):
        shutil.rmtree(old, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix="new-", dir=folder))
    try:
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)
