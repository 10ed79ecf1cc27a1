"""Whether this process can work: the log reports each change, and a file exists while it can.

One of several workers does not touch the file: it reports to its parent, by the pipe whose number is in
`PROCESSOR_READY_PIPE`. The file exists while all of them are ready.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import structlog

log = structlog.get_logger()

PIPE = "PROCESSOR_READY_PIPE"
READY, NOT_READY = b"1", b"0"


def sign(file: Path | None) -> Callable[[bool], None]:
    """Return how this process shows whether it is ready."""
    descriptor = os.environ.get(PIPE)
    return partial(show, file) if descriptor is None else partial(_tell, int(descriptor))


def show(file: Path | None, ready: bool) -> None:
    if file is not None:
        if ready:
            file.touch()
        else:
            file.unlink(missing_ok=True)


def _tell(descriptor: int, ready: bool) -> None:
    with suppress(OSError):  # the parent is gone
        os.write(descriptor, READY if ready else NOT_READY)


class Readiness:
    def __init__(self, file: Path | None) -> None:
        self._show = sign(file)
        self._obstacles: dict[object, str] = {"starting": "starting"}
        self._changing = threading.Lock()
        self._closed = False

    @property
    def ready(self) -> bool:
        return not self._obstacles

    def obstruct(self, what: object, reason: str) -> None:
        """Note that `what` keeps the process from its work, until it is cleared."""
        with self._changing:
            if not self._obstacles:
                self._show(False)
                log.warning("not_ready", reason=reason)
            self._obstacles[what] = reason

    def clear(self, what: object) -> None:
        with self._changing:
            if self._obstacles.pop(what, None) is not None and not self._obstacles and not self._closed:
                self._show(True)
                log.info("ready")

    def close(self) -> None:
        """Be ready no more, whatever is cleared later."""
        with self._changing:
            self._closed = True
            self._show(False)
