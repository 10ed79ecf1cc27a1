"""A process that outlives its owner by the time it takes to clean up after it.

It reads from a pipe whose other end only the owner holds. The owner says goodbye when it has taken the
stack down itself; a pipe that ends without it means the owner was killed, and the guard does it.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

GOODBYE = b"goodbye"


class Guard:
    """The owner's end."""

    def __init__(self, directory: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "processor.stack.guard", directory],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Nothing is left to guard."""
        self._process.communicate(GOODBYE)


def main(directory: Path) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.buffer.read() == GOODBYE:
        return
    # Only now: most guards never need it, and the stack's modules are the bulk of their memory.
    from processor.stack import Stack

    Stack(directory).down(purge=True, keep_logs=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
