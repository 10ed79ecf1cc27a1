"""What cannot be answered when it comes up: it is written down, and answered when everything has been read.

`settled` are keys of records that rightly have no row, with the reason. `questions` are records and outputs without
one, which those may explain. `outputs` are all outputs, to find those that come twice, and gaps between them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from processor.operations.verify.identity import KEY_BYTES
from processor.operations.verify.spill import Spill

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

FORGOTTEN = b"F"  # retention may have deleted the row
WITHOUT_INBOX = b"W"  # its type has none

NAMES = ("settled", "questions", "outputs")


class Question(NamedTuple):
    """A record of the input, or an output, for which the inbox has no row."""

    key: str  # in hexadecimal
    kind: str  # the finding that it becomes if nothing explains it
    topic: str
    partition: int
    offset: int
    id: str
    why: str


class Placed(NamedTuple):
    """An output, and where it is."""

    key: bytes  # of the message that caused it
    place: int  # among the outputs of that message
    timestamp_ms: int
    topic: int  # index
    partition: int
    offset: int


_placed = Struct(f">{KEY_BYTES}sIQHIQ")  # sorted as bytes, outputs are sorted by cause and place
MOST_PLACES = 2**32


class Book:
    """The three, on disk."""

    def __init__(self, folder: Path, sizes: Mapping[str, Sequence[int]]) -> None:
        self._settled, self._questions, self._outputs = (Spill(folder, name, sizes.get(name, ())) for name in NAMES)

    def settle(self, key: bytes, reason: bytes) -> None:
        self._settled.bucket(key).extend(key + reason)

    def ask(self, question: Question) -> None:
        self._questions.bucket(bytes.fromhex(question.key)).extend(orjson.dumps(list(question)) + b"\n")

    def place(self, output: Placed) -> None:
        self._outputs.bucket(output.key).extend(_placed.pack(*output))

    def full(self) -> bool:
        return any(spill.full() for spill in self._all)

    def flush(self) -> None:
        for spill in self._all:
            spill.flush()

    def sizes(self) -> dict[str, list[int]]:
        return {name: spill.sizes for name, spill in zip(NAMES, self._all, strict=True)}

    def settled(self, number: int) -> dict[bytes, bytes]:
        """The keys of one bucket that rightly have no row, with the reason."""
        found = self._settled.read(number)
        size = KEY_BYTES + 1
        return {found[at : at + KEY_BYTES]: found[at + KEY_BYTES : at + size] for at in range(0, len(found), size)}

    def questions(self, number: int) -> list[Question]:
        return [Question(*orjson.loads(line)) for line in self._questions.read(number).splitlines()]

    def outputs(self, number: int) -> Iterator[Placed]:
        """The outputs of one bucket, by cause and place."""
        found = self._outputs.read(number)
        size = _placed.size
        rows = [found[at : at + size] for at in range(0, len(found), size)]
        rows.sort()
        for row in rows:
            yield Placed._make(_placed.unpack(row))

    def delete(self) -> None:
        for spill in self._all:
            spill.delete()

    @property
    def _all(self) -> tuple[Any, ...]:
        return self._settled, self._questions, self._outputs
