"""What an audit has to compare in the end, in files: by the first bits of a key, so that each can be compared alone.

A file grows only at its end. So a checkpoint is a list of sizes, and going on from it means cutting off what is behind.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from processor.errors import SetupError

BUCKETS = 128
HELD_BYTES = 4_194_304


class Spill:
    def __init__(self, folder: Path, name: str, sizes: Sequence[int] = ()) -> None:
        self._paths = [folder / f"{name}-{number:03}" for number in range(BUCKETS)]
        self._held = [bytearray() for _ in range(BUCKETS)]
        self.sizes = list(sizes) or [0] * BUCKETS
        for path, size in zip(self._paths, self.sizes, strict=True):
            _cut(path, size)

    def bucket(self, key: bytes) -> bytearray:
        """Where the bytes of this key belong: append them."""
        return self._held[key[0] % BUCKETS]

    def full(self) -> bool:
        return sum(map(len, self._held)) >= HELD_BYTES

    def flush(self) -> None:
        for number, held in enumerate(self._held):
            if held:
                with self._paths[number].open("ab") as file:
                    file.write(held)
                self.sizes[number] += len(held)
                held.clear()

    def read(self, number: int) -> bytes:
        path = self._paths[number]
        return path.read_bytes() if self.sizes[number] else b""

    def delete(self) -> None:
        for path in self._paths:
            path.unlink(missing_ok=True)


def _cut(path: Path, size: int) -> None:
    there = path.stat().st_size if path.exists() else 0
    if there < size:
        raise SetupError(f"{path} has {there} bytes, {size} were written: delete the folder, and begin anew")
    if there > size:
        with path.open("r+b") as file:
            file.truncate(size)
