"""Ends what a killed test run left behind.

Reads `+pid` and `-pid` lines from a pipe whose other end only the test run holds. When the pipe ends, whoever
is still on the list is killed: processors may be frozen or busy, and their servers are gone by then.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress


class Reaper:
    """The test run's end of the pipe."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, bufsize=0, start_new_session=True
        )

    def watch(self, pid: int) -> None:
        self._say(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        self._say(f"-{pid}\n")

    def close(self) -> None:
        self._process.communicate()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    alive: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        (alive.add if line[0] == "+" else alive.discard)(pid)
    for pid in alive:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
