"""Files that keep rows before they go from the inbox: lines of JSON, compressed, each row in one file and once.

A file is appended to before the transaction that deletes its rows commits, and that transaction notes how long the file
is then (postgres/pruning.py). What a crash left behind that length was not deleted: it is cut off before anything else
is written. A file is named `.open` until its round is over; under its final name it never changes.

A process that is frozen may wake up after others have taken over. So each opens its file once, never makes it again,
and holds a lock on it for as long as it may write; others bring in order only what nobody holds.
"""

from __future__ import annotations

import fcntl
import gzip
import os
import re
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import BinaryIO

OPEN = ".open"


class Archive:
    """The file of one round; there is none before the first row."""

    def __init__(self, directory: Path, consumer: str, token: str) -> None:
        self.name = f"{consumer}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{token}.ndjson.gz"
        self.messages = 0  # that count
        self._path = directory / (self.name + OPEN)
        self._size = 0  # that counts
        self._file: BinaryIO | None = None
        self._using = threading.Lock()  # an append goes on in its thread when whoever waits for it is cancelled

    def append(self, lines: Iterable[str]) -> int:
        """Write the lines to the disk behind what counts; return how long the file is with them.

        A compressed file is a sequence of parts, so each append stands for itself.
        """
        with self._using:
            if self._file is None:
                self._file = self._path.open("xb")
                fcntl.flock(self._file, fcntl.LOCK_EX)
                _sync(self._path.parent)
            self._file.truncate(self._size)  # of an attempt that was rolled back
            self._file.seek(self._size)
            self._file.write(gzip.compress("".join(f"{line}\n" for line in lines).encode(), compresslevel=6))
            self._file.flush()
            os.fsync(self._file.fileno())
            return self._file.tell()

    def counts(self, size: int, messages: int) -> None:
        """The rows of the last append are deleted."""
        self._size = size
        self.messages += messages

    def close(self) -> str | None:
        """Give the file its final name; return that, or None if there is no file."""
        if self._file is None:
            return None
        _finish(self._file, self._path, self._size)
        return self.name if self._size else None

    def release(self) -> None:
        """Write no more: what is still open is now for others to bring in order."""
        with self._using:
            if self._file is not None:
                with suppress(OSError):  # what could not be written counts for nothing
                    self._file.close()


def left_open(directory: Path, consumer: str) -> list[str]:
    """The final names of files that are at work, or that processes that died have left."""
    pattern = re.compile(rf"{re.escape(consumer)}-\d{{8}}T\d{{6}}Z-[0-9a-f]{{8}}\.ndjson\.gz{re.escape(OPEN)}")
    return sorted(path.name.removesuffix(OPEN) for path in directory.iterdir() if pattern.fullmatch(path.name))


def settle(directory: Path, sizes: Mapping[str, int]) -> None:
    """Bring in order what processes that died have left; `sizes` says how many bytes of each of these files count."""
    for name, size in sizes.items():
        path = directory / (name + OPEN)
        with suppress(FileNotFoundError, BlockingIOError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # whoever holds it may only be frozen
            _finish(file, path, size)


def _finish(file: BinaryIO, path: Path, size: int) -> None:
    """Give the file its final name, or remove it if nothing counts. A name that is taken is never taken over."""
    if size:
        file.truncate(size)
        os.fsync(file.fileno())
        final = path.with_name(path.name.removesuffix(OPEN))
        try:
            final.hardlink_to(path)
        except FileExistsError:
            if not final.samefile(path):
                raise
    path.unlink(missing_ok=True)
    _sync(path.parent)


def _sync(directory: Path) -> None:
    """A new name, too, is on the disk only when its directory is."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
