"""Files that keep rows before they go from the inbox: lines of JSON, compressed, each row in one file and once.

A file is appended to before the transaction that deletes its rows commits, and that transaction notes how long the file
is then (postgres/pruning.py). What a crash left behind that length was not deleted: it is cut off before anything else
is written. A file is named `.open` until its round is over; under its final name it never changes.
"""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path

OPEN = ".open"


class Archive:
    """The file of one round; there is none before the first row."""

    def __init__(self, directory: Path, consumer: str, token: str) -> None:
        self.name = f"{consumer}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{token}.ndjson.gz"
        self.messages = 0  # that count
        self._path = directory / (self.name + OPEN)
        self._size = 0  # that counts

    def append(self, lines: Iterable[str]) -> int:
        """Write the lines to the disk behind what counts; return how long the file is with them.

        A compressed file is a sequence of parts, so each append stands for itself.
        """
        made = not self._path.exists()
        with self._path.open("ab") as file:
            file.truncate(self._size)  # of an attempt that was rolled back
            file.write(gzip.compress("".join(f"{line}\n" for line in lines).encode(), compresslevel=6))
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        if made:
            _sync(self._path.parent)
        return size

    def counts(self, size: int, messages: int) -> None:
        """The rows of the last append are deleted."""
        self._size = size
        self.messages += messages

    def close(self) -> str | None:
        """Give the file its final name; return that, or None if there is no file."""
        if not self._path.exists():
            return None
        _settle(self._path, self._size)
        return self.name if self._size else None


def settle(directory: Path, consumer: str, counting: Mapping[str, int]) -> None:
    """Bring in order what processes that died have left; `counting` says how many bytes of each file count."""
    pattern = re.compile(rf"{re.escape(consumer)}-\d{{8}}T\d{{6}}Z-[0-9a-f]{{8}}\.ndjson\.gz{re.escape(OPEN)}")
    for path in sorted(directory.iterdir()):
        if pattern.fullmatch(path.name):
            _settle(path, counting.get(path.name.removesuffix(OPEN), 0))


def _settle(path: Path, size: int) -> None:
    if not size:
        path.unlink()
    else:
        with path.open("r+b") as file:
            file.truncate(size)
            os.fsync(file.fileno())
        path.rename(path.with_name(path.name.removesuffix(OPEN)))
    _sync(path.parent)


def _sync(directory: Path) -> None:
    """A new name, too, is on the disk only when its directory is."""
    opened = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)
