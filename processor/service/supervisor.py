"""Runs several worker processes under one parent: restarts them with backoff, and stops them on one signal.

Workers share nothing but the consumer group. Each runs in a session of its own, so that Ctrl-C reaches it once, through
the parent. Each holds the end of a pipe, so that it stops when the parent dies.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog

from processor.observe import logs, readiness

log = structlog.get_logger()

PIPE = "PROCESSOR_SUPERVISOR_PIPE"
# Exit codes for a wrong configuration, and for a halt that an operator must resolve: a restart would only repeat them.
FINAL = (2, 3)
FIRST_DELAY_SECONDS = 0.5
LONGEST_DELAY_SECONDS = 30.0
# A worker that ran this long was healthy and is replaced at once. Delays are for workers that cannot even start.
HEALTHY_SECONDS = 10.0


def run(command: Sequence[str], workers: int, ready_file: Path | None) -> int:
    return asyncio.run(_Supervisor(command, workers, ready_file).supervise())


def orphaned(stop: Callable[[], None]) -> Callable[[], None]:
    """In a worker, call `stop` when the supervisor dies. Return a function that ends this watch."""
    descriptor = os.environ.get(PIPE)
    if descriptor is None:
        return lambda: None
    loop = asyncio.get_running_loop()

    def stop_watching() -> None:
        loop.remove_reader(int(descriptor))

    def gone() -> None:
        stop_watching()
        stop()

    loop.add_reader(int(descriptor), gone)
    return stop_watching


class _ReadyFile:
    """It is there while all workers are ready, as each says through a pipe of its own."""

    def __init__(self, file: Path | None, workers: int) -> None:
        self._file = file
        self._ready = dict.fromkeys(range(workers), False)
        self._pipes: dict[int, int] = {}  # of the processes that live, by worker

    def begin(self, worker: int) -> int:
        """What a new process of this worker is to write to."""
        self._pipes[worker], saying = os.pipe()
        asyncio.get_running_loop().add_reader(self._pipes[worker], self._hear, worker)
        return saying

    def end(self, worker: int) -> None:
        """The process is gone, whatever it still has to say."""
        pipe = self._pipes.pop(worker)
        asyncio.get_running_loop().remove_reader(pipe)
        os.close(pipe)
        self._set(worker, False)

    def _hear(self, worker: int) -> None:
        said = os.read(self._pipes[worker], 4096)
        if not said:  # it has ended
            asyncio.get_running_loop().remove_reader(self._pipes[worker])
        self._set(worker, said.endswith(readiness.READY))

    def _set(self, worker: int, ready: bool) -> None:
        before = all(self._ready.values())
        self._ready[worker] = ready
        if all(self._ready.values()) != before:
            readiness.show(self._file, not before)


class _Supervisor:
    def __init__(self, command: Sequence[str], workers: int, ready_file: Path | None) -> None:
        self._command = command
        self._workers = workers
        self._ready_file = _ReadyFile(ready_file, workers)
        self._stopping = asyncio.Event()
        self._processes: set[asyncio.subprocess.Process] = set()
        self._exit_code = 0

    async def supervise(self) -> int:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_signal, signal.Signals(number))
        watched, held = os.pipe()
        try:
            await asyncio.gather(*(self._keep_running(index, watched) for index in range(self._workers)))
        finally:
            os.close(held)
            os.close(watched)
        return self._exit_code

    def _on_signal(self, number: signal.Signals) -> None:
        if self._stopping.is_set():  # workers do not finish any more
            self._exit_code = self._exit_code or 128 + number
        self._stop(number.name)

    def _stop(self, reason: str) -> None:
        """Pass a signal on: at the first one workers finish, at the second one they stop at once."""
        log.info("stopping_workers", reason=reason, workers=len(self._processes))
        self._stopping.set()
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)

    async def _keep_running(self, index: int, watched: int) -> None:
        failures = 0
        while not self._stopping.is_set():
            started = time.monotonic()
            process = await self._start(index, watched)
            self._processes.add(process)
            log.info("worker_started", worker=index, pid=process.pid)
            if self._stopping.is_set():  # a stop came while the worker was being started
                process.send_signal(signal.SIGTERM)
            code = await process.wait()
            self._ready_file.end(index)
            self._processes.discard(process)
            if self._stopping.is_set():
                return
            if code in FINAL:
                self._exit_code = code
                self._stop(f"worker {index} exited with {code}")
                return
            failures = 0 if time.monotonic() - started > HEALTHY_SECONDS else failures + 1
            delay = restart_delay(failures)
            log.warning("worker_ended", worker=index, pid=process.pid, exit_code=code, restart_in_seconds=delay)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay)

    async def _start(self, index: int, watched: int) -> asyncio.subprocess.Process:
        saying = self._ready_file.begin(index)
        try:
            return await asyncio.create_subprocess_exec(
                *self._command,
                env={
                    **os.environ,
                    PIPE: str(watched),
                    readiness.PIPE: str(saying),
                    logs.WORKER: str(index),
                    "PROCESSOR_WORKERS": "1",
                },
                pass_fds=(watched, saying),
                start_new_session=True,
            )
        finally:
            os.close(saying)


def restart_delay(failures: int) -> float:
    """Return how long to wait after this many ends in a row that came too soon after the start."""
    return min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(failures - 1, 32)) if failures else 0.0
