"""Named points of the protocol where a test can kill or freeze the process.

`PROCESSOR_FAILPOINTS="after_postgres_commit=kill@3"` sends SIGKILL to this process when it
passes that point for the third time; `stop` freezes it with SIGSTOP. Commas separate several.
Without the variable, a point costs one look at an empty dict per batch.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

from processor.errors import ConfigError

POINTS = (
    "after_intent",
    "after_effect",
    "before_claim",
    "after_claim",
    "after_prepare",
    "after_handlers",
    "before_ledger",
    "after_ledger",
    "before_postgres_commit",
    "after_postgres_commit",
    "after_begin",
    "after_produce",
    "after_offsets",
    "before_kafka_commit",
    "after_kafka_commit",
    "after_portion",
    "after_reposition",
    "before_forgetting",
    "after_forgetting",
)

ACTIONS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


@dataclass(slots=True)
class _Armed:
    action: str
    passes_left: int


_armed: dict[str, _Armed] = {}
_lock = threading.Lock()


def arm(specification: str) -> None:
    """Replace all armed points by those of `point=action[@pass],…`; an empty text disarms everything."""
    armed = {}
    for item in filter(None, (part.strip() for part in specification.split(","))):
        point, _, rest = item.partition("=")
        action, _, passes = rest.partition("@")
        if point not in POINTS or action not in ACTIONS or not (passes or "1").isdigit():
            raise ConfigError(
                f"PROCESSOR_FAILPOINTS: {item!r} is not point=action[@pass]; "
                f"points: {', '.join(POINTS)}; actions: {', '.join(ACTIONS)}"
            )
        armed[point] = _Armed(action, int(passes or "1"))
    with _lock:
        _armed.clear()
        _armed.update(armed)


def reach(point: str) -> None:
    if _armed:
        _pass(point)


def _pass(point: str) -> None:
    with _lock:
        armed = _armed.get(point)
        if armed is None:
            return
        armed.passes_left -= 1
        if armed.passes_left > 0:
            return
        del _armed[point]
    os.kill(os.getpid(), ACTIONS[armed.action])
