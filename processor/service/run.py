"""`processor run`: one engine in this process, or a supervisor with several; signals, deadlines, exit codes.

First SIGTERM or SIGINT: finish the batch, publish it, leave the group, exit 0. Unfinished work is
rolled back when run.stop_timeout_ms is nearly over. A second signal ends the process at once; that
is safe at any time, since the next start repairs whatever was left.
"""

from __future__ import annotations

import asyncio
import os
import queue
import signal
import sys
import threading
import time
from contextlib import suppress

import structlog
import uvloop

from processor import failpoints
from processor.engine.engine import Engine
from processor.errors import ProcessorError
from processor.handling import registry
from processor.observe import readiness
from processor.observe.stalls import exit_after, exit_now
from processor.postgres import connections, migrate, rights
from processor.service import interpreter, supervisor
from processor.settings.schema import Settings

log = structlog.get_logger()

# The share of the stop time-out in which the batch may finish; the rest is for rolling back and leaving the group.
GRACE = 0.7
# How often to wake the main thread, so that it handles a second signal.
NUDGE_SECONDS = 0.2


def run(settings: Settings, workers: int = 1) -> int:
    """Run the service and return the exit code; raise ProcessorError if it cannot or must not go on."""
    # A process that was killed has left its file: it goes before anything that may fail or wait.
    readiness.sign(settings.run.ready_file)(False)
    if workers > 1:
        command = [sys.executable, "-m", "processor", "run", settings.source]
        return supervisor.run(command, workers, settings.run.ready_file)
    failpoints.arm(os.environ.get("PROCESSOR_FAILPOINTS", ""))
    routes = registry.load(settings)
    interpreter.tune()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(settings, routes))
        except SystemExit as escaped:
            # It came from a task that a handler started: it ends the loop, and the message at fault is unknown.
            # Exit at once: this counts as a death at the message, which is quarantined after several.
            log.error("ended_by_a_handlers_task", reason=f"a task raised SystemExit: {escaped}")  # noqa: TRY400
            exit_now(1)
    return 0


async def _serve(settings: Settings, routes: registry.Routes) -> None:
    async with connections.connected(settings) as connection:
        await rights.require(connection, settings)
        await migrate.require_current(connection, migrate.sets(settings))
    engine = Engine(settings, routes)
    running = asyncio.ensure_future(engine.run())
    stop = _Stop(engine, running, settings.run.stop_timeout_ms / 1000)
    stop.listen()
    orphaned = supervisor.orphaned(stop.ask)
    try:
        await running
    except asyncio.CancelledError:
        if not stop.asked:
            raise
        log.warning("stopped_with_work_rolled_back")
    except BaseException as error:
        # The process outlives the event loop: threads that wait for a broker are joined after it.
        code = error.exit_code if isinstance(error, ProcessorError) else 1
        exit_after(settings.run.stop_timeout_ms / 1000, code, str(error))
        raise
    finally:
        stop.over()
        orphaned()
    log.info("stopped")


class _Stop:
    """Waits for signals on its own thread: the event loop gets none while a handler blocks it."""

    def __init__(self, engine: Engine, running: asyncio.Future[None], seconds: float) -> None:
        self._engine = engine
        self._running = running
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._grace: asyncio.TimerHandle | None = None
        self._signals: queue.SimpleQueue[signal.Signals | None] = queue.SimpleQueue()  # reentrant
        self.asked = False

    def listen(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda number, _frame: self._signals.put(signal.Signals(number)))
        signal.signal(signal.SIGURG, lambda _number, _frame: None)  # ignored by default, and then wakes no thread
        threading.Thread(target=self._hear, name="signals", daemon=True).start()

    def ask(self) -> None:
        """Ask the service to stop, as a signal does."""
        self._signals.put(None)

    def over(self) -> None:
        if self._grace is not None:
            self._grace.cancel()

    def _hear(self) -> None:
        number = self._signals.get()
        log.info("stopping", reason=_reason(number), seconds_at_most=self._seconds)
        self.asked = True
        exit_after(self._seconds, 0)
        with suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._begin, time.monotonic() + self._seconds * GRACE)
        number = self._next_signal()
        log.warning("stopping_at_once", reason=_reason(number))
        exit_now(128 + (number or signal.SIGTERM))

    def _next_signal(self) -> signal.Signals | None:
        """Return the next signal. One that comes just before the main thread blocks is handled only after a wake-up."""
        while True:
            try:
                return self._signals.get(timeout=NUDGE_SECONDS)
            except queue.Empty:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    def _begin(self, until: float) -> None:
        self._grace = self._loop.call_later(max(0.0, until - time.monotonic()), self._running.cancel)
        self._engine.stop()


def _reason(number: signal.Signals | None) -> str:
    return number.name if number else "supervisor gone"
