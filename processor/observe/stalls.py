"""Says which handler is at one message for long, goes on past its time-out, or blocks the event loop.

From a thread of its own: an event loop that is blocked says nothing, and cancels nobody. A handler that will not be
cancelled has `run.stop_timeout_ms` more than its time-out, and the loop as much when it is not a handler that blocks
it. Then the process ends on the spot. That is as safe as any other crash, and it counts as a death of the message,
which is quarantined after some.
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
# Longer than any batch of ours keeps the loop to itself.
BLOCKED_SECONDS = 2.0
# A handler that was cancelled may have something to put in order.
STUCK_SECONDS = 2.0


class Call(Protocol):
    """Somebody who calls handlers, one after the other."""

    began: float | None  # when the handler was called; None while none is running
    task: asyncio.Task[object]

    @property
    def handler(self) -> str:
        """The name of the handler that is running."""

    @property
    def timeout_seconds(self) -> float:
        """How long it may take."""

    def what(self) -> str:
        """What it is at, for people."""


@dataclass(slots=True)
class _Seen:
    began: float
    since: float
    said_busy: bool = False
    said_stuck: bool = False


class Stalls:
    def __init__(self, timeout_seconds: float, grace_seconds: float, readiness: Readiness) -> None:
        self.calls: set[Call] = set()
        self._timeout = timeout_seconds
        self._grace = grace_seconds
        self._readiness = readiness
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        # Goes on by one look each at most: what was frozen, and comes back, has not been at it for all that time.
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
            self._heard_at = self._time  # a loop in which handlers come to an end is not blocked
            return
        seconds, timeout = self._time - seen.since, call.timeout_seconds
        if seconds > timeout / 2 and not seen.said_busy:
            seen.said_busy = True
            log.warning("handler_busy", **self._told(call, seconds), timeout_seconds=timeout)
        if seconds > timeout + STUCK_SECONDS and not seen.said_stuck:
            seen.said_stuck = True
            log.error("handler_stuck", **self._told(call, seconds), ends_process_at_seconds=timeout + self._grace)
            self._readiness.obstruct(call, f"{call.handler} goes on past its time-out: {call.what()}")
        if seconds > timeout + self._grace:
            self._end("handler_ended_with_its_process", **self._told(call, seconds))

    def _ended(self, call: Call, seen: _Seen) -> None:
        if seen.said_stuck:
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
            except RuntimeError:  # it is closed
                self._closing.set()
            return
        seconds = self._time - self._heard_at
        if seconds > BLOCKED_SECONDS and self._blocked is None:
            task = asyncio.current_task(self._loop)
            call = next((call for call in self._seen if call.task is task), None)
            self._blocked = call.handler if call else "no handler"
            told = self._told(call, self._time - self._seen[call].since) if call else {"seconds": round(seconds, 1)}
            log.warning("event_loop_blocked", **told, where=self._where())
            self._readiness.obstruct(self, f"{self._blocked} blocks the event loop")
        if seconds > self._timeout + self._grace and not self._seen:
            self._end("blocked_event_loop_ended_with_its_process", seconds=round(seconds, 1), where=self._where())

    def _answer(self) -> None:
        self._answered = True

    def _told(self, call: Call, seconds: float) -> dict[str, object]:
        return {"handler": call.handler, "at": call.what(), "seconds": round(seconds, 1)}

    def _where(self) -> str:
        """From the handler to where it is, as far as it is one."""
        inside = takewhile(
            lambda at: not at[0].f_globals.get("__name__", "").startswith("processor.handling."),
            walk_stack(sys._current_frames().get(self._loop_thread)),  # noqa: SLF001
        )
        places = [f"{Path(frame.f_code.co_filename).name}:{line} {frame.f_code.co_name}" for frame, line in inside]
        return " > ".join(reversed(places[:5]))

    def _end(self, event: str, **said: object) -> None:
        log.error(event, **said, note=NOTE)
        exit_now(1)


def exit_after(seconds: float, code: int, reason: str = "asked to stop") -> Callable[[], None]:
    """End the process if it has not ended by itself by then. Returns how to take that back.

    From a thread, because the end of the loop is not the end of the process: threads that wait for a broker are joined
    after it.
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
