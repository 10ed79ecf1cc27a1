"""Reports a handler that takes long, ignores its time-out, or blocks the event loop, and ends the process if need be.

It runs on its own thread, because a blocked event loop can neither log nor cancel. A handler that ignores its
cancellation gets `run.stop_timeout_ms` on top of its time-out, and so does a loop that something else than a handler
blocks. Then the process ends at once. That is as safe as any other crash, and it counts as a death at the message,
which is quarantined after several.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from traceback import walk_stack
from typing import TYPE_CHECKING, Protocol

import structlog

if TYPE_CHECKING:
    from collections.abc import Callable

    from processor.observe.readiness import Readiness

log = structlog.get_logger()

NOTE = "the next start repairs what was left"
LOOK_SECONDS = 0.25
# Longer than our own work on any batch blocks the loop.
BLOCKED_SECONDS = 2.0
# How long a cancelled handler may take to clean up.
STUCK_SECONDS = 2.0


class Call(Protocol):
    """A task that calls handlers, one after another."""

    began: float | None  # when the handler was called; None while none is running
    task: asyncio.Task[object]

    @property
    def handler(self) -> str:
        """The name of the handler that is running."""

    @property
    def timeout_seconds(self) -> float:
        """How long it may take."""

    def what(self) -> str:
        """Describe the messages of the running handler, for people."""


@dataclass(slots=True)
class _Seen:
    began: float
    since: float
    reported_busy: bool = False
    reported_stuck: bool = False


class Stalls:
    def __init__(self, timeout_seconds: float, grace_seconds: float, readiness: Readiness) -> None:
        self.calls: set[Call] = set()
        self._timeout = timeout_seconds
        self._grace = grace_seconds
        self._readiness = readiness
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        # Our own clock. It advances by at most two looks at a time: a process that was frozen did not work meanwhile.
        self._time = 0.0
        self._answered = True
        self._heard_at = 0.0
        self._blocked: str | None = None
        self._seen: dict[Call, _Seen] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._closing.set()

    def _run(self) -> None:
        last = time.monotonic()
        while not self._closing.wait(LOOK_SECONDS):
            now = time.monotonic()
            self._time += min(now - last, 2 * LOOK_SECONDS)
            last = now
            running = {call: call.began for call in list(self.calls)}
            for call in [*self._seen]:
                if self._seen[call].began != running.get(call):
                    self._ended(call, self._seen.pop(call))
            for call, began in running.items():
                if began is not None:
                    self._look_at(call, began)
            self._look_at_the_loop()

    def _look_at(self, call: Call, began: float) -> None:
        seen = self._seen.get(call)
        if seen is None:
            self._seen[call] = _Seen(began, self._time)
            self._heard_at = self._time  # a loop that starts handlers is not blocked
            return
        seconds, timeout = self._time - seen.since, call.timeout_seconds
        if seconds > timeout / 2 and not seen.reported_busy:
            seen.reported_busy = True
            log.warning("handler_busy", **self._described(call, seconds), timeout_seconds=timeout)
        if seconds > timeout + STUCK_SECONDS and not seen.reported_stuck:
            seen.reported_stuck = True
            log.error("handler_stuck", **self._described(call, seconds), ends_process_at_seconds=timeout + self._grace)
            self._readiness.obstruct(call, f"{call.handler} ignores its time-out: {call.what()}")
        if seconds > timeout + self._grace:
            self._end("handler_ended_with_its_process", **self._described(call, seconds))

    def _ended(self, call: Call, seen: _Seen) -> None:
        if seen.reported_stuck:
            self._readiness.clear(call)
            log.warning("handler_unstuck", seconds=round(self._time - seen.since, 1))

    def _look_at_the_loop(self) -> None:
        if self._answered:
            if self._blocked is not None:
                log.warning("event_loop_free_again", handler=self._blocked)
                self._readiness.clear(self)
                self._blocked = None
            self._answered, self._heard_at = False, self._time
            try:
                self._loop.call_soon_threadsafe(self._answer)
            except RuntimeError:  # the loop is closed
                self._closing.set()
            return
        seconds = self._time - self._heard_at
        if seconds > BLOCKED_SECONDS and self._blocked is None:
            task = asyncio.current_task(self._loop)
            call = next((call for call in self._seen if call.task is task), None)
            self._blocked = call.handler if call else "no handler"
            described: dict[str, object] = {"seconds": round(seconds, 1)}
            if call:
                described = self._described(call, self._time - self._seen[call].since)
            log.warning("event_loop_blocked", **described, where=self._where())
            self._readiness.obstruct(self, f"{self._blocked} blocks the event loop")
        if seconds > self._timeout + self._grace and not self._seen:
            self._end("blocked_event_loop_ended_with_its_process", seconds=round(seconds, 1), where=self._where())

    def _answer(self) -> None:
        self._answered = True

    def _described(self, call: Call, seconds: float) -> dict[str, object]:
        return {"handler": call.handler, "at": call.what(), "seconds": round(seconds, 1)}

    def _where(self) -> str:
        """Return the loop thread's stack, from the handler inwards if one is running."""
        inside = takewhile(
            lambda at: not at[0].f_globals.get("__name__", "").startswith("processor.handling."),
            walk_stack(sys._current_frames().get(self._loop_thread)),  # noqa: SLF001
        )
        places = [f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}" for frame, line in inside]
        return " > ".join(reversed(places[:5]))

    def _end(self, event: str, **data: object) -> None:
        log.error(event, **data, note=NOTE)
        exit_now(1)


def exit_after(seconds: float, code: int, reason: str = "asked to stop") -> Callable[[], None]:
    """End the process if it still runs after this time. Return a function that cancels this.

    It uses a thread, because the process outlives the event loop: threads that wait for a broker are joined after it.
    """

    def give_up() -> None:
        log.warning("stop_timed_out", reason=reason, exit_code=code, note=NOTE)
        exit_now(code)

    deadline = threading.Timer(seconds, give_up)
    deadline.daemon = True
    deadline.start()
    return deadline.cancel


def exit_now(code: int) -> None:
    sys.stderr.flush()
    os._exit(code)
