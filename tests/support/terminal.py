"""A command on a terminal, as somebody who looks at it sees it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from tests.support.waiting import eventually

ROWS, COLUMNS = 60, 240
SECONDS = 30.0
# What a picture that is drawn anew begins with: every line of the one before is erased.
_ERASED = "\x1b[2K"
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


class Terminal:
    def __init__(self, process: subprocess.Popen[bytes], screen: int) -> None:
        self.process = process
        self._screen = screen
        self._shown = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def picture(self) -> str:
        """What stands there now, without its colours."""
        return _CONTROL.sub("", self._shown.decode(errors="replace").rpartition(_ERASED)[2])

    def wait_for(self, *texts: str) -> None:
        """Until all of these stand there together."""
        eventually(
            lambda: all(text in " ".join(self.picture.split()) for text in texts),
            SECONDS,
            lambda: f"{texts} on the screen:\n{self.picture}",
        )

    def interrupt(self) -> int:
        """Ctrl-C; the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(SECONDS)

    def _read(self) -> None:
        with suppress(OSError):  # how Linux says that the other side has gone
            while piece := os.read(self._screen, 65_536):
                self._shown += piece


@contextmanager
def terminal(directory: Path, *arguments: str, **environ: str) -> Iterator[Terminal]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PROCESSOR_", "COLUMNS"))}
    process = subprocess.Popen(
        [sys.executable, "-m", "processor", *arguments],
        cwd=directory,
        env=inherited | {"TERM": "xterm-256color"} | environ,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = Terminal(process, ours)
    try:
        yield shown
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        shown._reader.join()
        os.close(ours)
