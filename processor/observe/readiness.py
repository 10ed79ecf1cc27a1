"""Whether this process can work: the log reports each change, and a file exists while it can."""

from __future__ import annotations

import threading
from pathlib import Path

import structlog

log = structlog.get_logger()


class Readiness:
    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._obstacles: dict[object, str] = {"starting": "starting"}
        self._changing = threading.Lock()
        self._closed = False
        self._remove()

    @property
    def ready(self) -> bool:
        return not self._obstacles

    def obstruct(self, what: object, reason: str) -> None:
        """Note that `what` keeps the process from its work, until it is cleared."""
        with self._changing:
            if not self._obstacles:
                self._remove()
                log.warning("not_ready", reason=reason)
            self._obstacles[what] = reason

    def clear(self, what: object) -> None:
        with self._changing:
            if self._obstacles.pop(what, None) is not None and not self._obstacles and not self._closed:
                if self._file is not None:
                    self._file.touch()
                log.info("ready")

    def close(self) -> None:
        """Be ready no more, whatever is cleared later."""
        with self._changing:
            self._closed = True
            self._remove()

    def _remove(self) -> None:
        if self._file is not None:
            self._file.unlink(missing_ok=True)
