"""`processor run`: one engine in this process, or a supervisor with several; signals, deadlines, exit codes.

First SIGTERM or SIGINT: finish the batch, publish it, leave the group, exit 0. What is not done
when run.stop_timeout_ms is nearly over is rolled back. A second signal ends the process on the spot; that
is safe at any time, since the next start repairs whatever was left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading

import structlog
import uvloop

from processor import dispatch, failpoints, interpreter, migrate, supervisor
from processor.config import Settings
from processor.engine import Engine

log = structlog.get_logger()

# The part of the stop time-out in which the batch may finish; the rest is for rolling back and leaving.
GRACE = 0.7


def run(settings: Settings, workers: int = 1) -> int:
    """The exit code; raises ProcessorError where the service cannot or must not go on."""
    if workers > 1:
        return supervisor.run([sys.executable, "-m", "processor", "run", settings.source], workers)
    failpoints.arm(os.environ.get("PROCESSOR_FAILPOINTS", ""))
    routes = dispatch.load(settings)
    interpreter.tune()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_serve(settings, routes))
        except SystemExit as escaped:
            # Out of a task that a handler started: it ends the loop, and nobody can tell whose it was.
            # On the spot: so it counts as a death of the message, which is quarantined after some.
            log.error("ended_by_a_handlers_task", reason=f"a task raised SystemExit: {escaped}")  # noqa: TRY400
            _exit(1)
    return 0


async def _serve(settings: Settings, routes: dispatch.Routes) -> None:
    async with migrate.connected(settings) as connection:
        await migrate.require_current(connection, migrate.sets(settings))
    engine = Engine(settings, routes)
    running = asyncio.ensure_future(engine.run())
    stop = _Stop(engine, running, settings.run.stop_timeout_ms / 1000)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.asked, signal.Signals(number))
    orphaned = supervisor.orphaned(stop.asked)
    try:
        await running
    except asyncio.CancelledError:
        if not stop.begun:
            raise
        log.warning("stopped_with_work_rolled_back")
    except BaseException:
        _exit_anyway(settings.run.stop_timeout_ms / 1000, 1)
        raise
    finally:
        stop.over()
        orphaned()
    log.info("stopped")


class _Stop:
    def __init__(self, engine: Engine, running: asyncio.Future[None], seconds: float) -> None:
        self._engine = engine
        self._running = running
        self._seconds = seconds
        self._grace: asyncio.TimerHandle | None = None

    @property
    def begun(self) -> bool:
        return self._grace is not None

    def asked(self, number: signal.Signals | None = None) -> None:
        reason = number.name if number else "supervisor gone"
        if self.begun:
            log.warning("stopping_at_once", reason=reason)
            _exit(128 + (number or signal.SIGTERM))
        log.info("stopping", reason=reason, seconds_at_most=self._seconds)
        self._grace = asyncio.get_running_loop().call_later(self._seconds * GRACE, self._running.cancel)
        _exit_anyway(self._seconds, 0)
        self._engine.stop()

    def over(self) -> None:
        if self._grace is not None:
            self._grace.cancel()


def _exit_anyway(seconds: float, code: int) -> None:
    """From a thread, because the end of the loop is not the end of the process: threads that wait for a
    broker are joined after it."""

    def give_up() -> None:
        log.warning("stop_timed_out", note="the next start repairs what was left")
        _exit(code)

    deadline = threading.Timer(seconds, give_up)
    deadline.daemon = True
    deadline.start()


def _exit(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)
