"""The one place where tests ask again and again.

Some facts announce themselves (a log line, the end of a process) and are waited for where they do. What is
committed in Kafka or visible in Postgres does not: nobody tells a bystander. Those are asked for here, often
and with a deadline, never slept for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

INTERVAL_SECONDS = 0.05


def eventually(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Return once the condition holds; fail, saying what was waited for, when the time is over."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while not condition():
        if time.monotonic() > deadline:
            text = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {seconds:g} s: {text}")
        pause.wait(INTERVAL_SECONDS)


def throughout(condition: Callable[[], object], seconds: float, what: str | Callable[[], str]) -> None:
    """Return when the time is over; fail, saying what was to stay so, as soon as the condition does not hold."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while time.monotonic() < deadline:
        if not condition():
            raise AssertionError(f"not all the time for {seconds:g} s: {what if isinstance(what, str) else what()}")
        pause.wait(INTERVAL_SECONDS)
