"""`processor run` as a real process: started, frozen, killed, and followed by what it logs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil

from tests.support.deployments import PROJECT, Deployment
from tests.support.reaper import Reaper
from tests.support.waiting import eventually

Event = dict[str, Any]
TAIL = 40


class Process:
    """One `processor run`; every JSON line on its stderr is an event to wait for."""

    def __init__(self, deployment: Deployment, reaper: Reaper, *arguments: str, **environ: str) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
        logs = {"PROCESSOR_LOG_FORMAT": "json", "PROCESSOR_LOG_LEVEL": "info"}
        self._reaper = reaper
        self._changed = threading.Condition()
        self._events: list[Event] = []
        self._ended = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", "processor", "run", str(deployment.config), *arguments],
            cwd=PROJECT,
            env=inherited | logs | deployment.environment | environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        reaper.watch(self.pid)
        self._reader = threading.Thread(target=self._read, name=f"log-{self.pid}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def all_events(self) -> list[Event]:
        """Everything it has logged so far."""
        with self._changed:
            return list(self._events)

    def events(self, event: str, **expected: Any) -> list[Event]:
        """What it has logged so far under this name, with these values."""
        with self._changed:
            return [found for found in self._events if _matches(found, event, expected)]

    def wait_for(self, event: str, seconds: float = 30.0, *, count: int = 1, **expected: Any) -> Event:
        """The event, when it is there for the given time; fails at once if the process ends without it."""
        found: list[Event] = []

        def there() -> bool:
            found[:] = self.events(event, **expected)
            return len(found) >= count or self._ended

        with self._changed:
            self._changed.wait_for(there, seconds)
        assert len(found) >= count, (
            f"no event {event} {expected or ''} number {count} "
            + ("before the process ended" if self._ended else f"within {seconds:g} s")
            + self.tail()
        )
        return found[count - 1]

    def wait_for_partitions(self, number: int, seconds: float = 30.0) -> None:
        """Until it has recovered this many partitions, counted since it was started."""
        self.wait_for("partition_ready", seconds, count=number)

    def wait(self, seconds: float = 30.0) -> int:
        """Its exit code; negative for the signal that killed it."""
        try:
            code = self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"the process did not end within {seconds:g} s{self.tail()}") from None
        self._reader.join()
        return code

    def wait_until_frozen(self, seconds: float = 30.0) -> None:
        """Until SIGSTOP, ours or a failpoint's, has taken effect."""
        process = psutil.Process(self.pid)
        eventually(
            lambda: process.status() == psutil.STATUS_STOPPED or not self.running,
            seconds,
            lambda: f"process frozen{self.tail()}",
        )
        assert self.running, f"the process ended instead of freezing{self.tail()}"

    def terminate(self) -> None:
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> int:
        self._process.send_signal(signal.SIGKILL)
        return self.wait()

    def stop(self) -> None:
        """SIGSTOP: it keeps its connections and answers nobody."""
        self._process.send_signal(signal.SIGSTOP)
        self.wait_until_frozen()

    def cont(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def workers(self) -> list[int]:
        """With --workers: the pids of all workers ever started, in order."""
        return [event["pid"] for event in self.events("worker_started")]

    def kill_worker(self, pid: int) -> None:
        assert pid in self.workers()
        os.kill(pid, signal.SIGKILL)

    def clean_up(self) -> None:
        """Leave nothing behind; workers of a killed supervisor end by themselves, but only if they are not frozen."""
        if self.running:
            self.kill()
        self._reader.join()
        self._reaper.forget(self.pid)
        assert self._process.stderr is not None
        self._process.stderr.close()
        for pid in self.workers():
            with suppress(psutil.NoSuchProcess):
                worker = psutil.Process(pid)
                if "processor" in worker.cmdline():
                    worker.kill()

    def tail(self) -> str:
        """The last lines of its log, for the message of a failure."""
        with self._changed:
            return "\n  " + "\n  ".join(json.dumps(event) for event in self._events[-TAIL:])

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            with self._changed:
                self._events.append(_parsed(line) | {"seen": time.monotonic()})
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()


def _parsed(line: str) -> Event:
    with suppress(json.JSONDecodeError):
        event = json.loads(line)
        if isinstance(event, dict):
            return event
    return {"event": "text", "text": line.rstrip()}


def _matches(event: Event, name: str, expected: dict[str, Any]) -> bool:
    return event.get("event") == name and all(event.get(key) == value for key, value in expected.items())
