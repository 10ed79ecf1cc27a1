"""Cuts stored outputs into portions that one Kafka transaction can send in time. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition
    from processor.kafka.producer import Offset
    from processor.messages.outputs import EncodedOutputs

# Bytes that an output takes besides its key and value: headers, and Kafka's format.
OUTPUT_OVERHEAD = 200


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Stored outputs of one partition that one transaction sends, and the offset that it commits with them."""

    partition: OwnedPartition
    outputs: EncodedOutputs
    offset: Offset
    size: int


def split(outputs: EncodedOutputs, limit: int) -> Iterator[tuple[EncodedOutputs, int | None, int]]:
    """Cut outputs, in their order, into parts of about `limit` bytes: yield the part, its end offset, and its size.

    It cuts only where all outputs before the cut have earlier causes than all after it: an offset can then tell which
    are sent, and the outputs of one record stay together. The last part has no end offset: it goes up to the end.
    """
    texts = zip(outputs.keys, outputs.values, strict=True)
    sizes = [len(key or b"") + len(value or b"") + OUTPUT_OVERHEAD for key, value in texts]
    up_to = list(accumulate(outputs.offsets, max))
    later = list(accumulate(reversed(outputs.offsets), min))[::-1]
    start = size = 0
    cut = None  # the last possible cut, and the size of the outputs before it
    for at, more in enumerate(sizes):
        if at > start and up_to[at - 1] < later[at]:
            cut = at, size
        if size + more > limit and cut is not None:
            end, before = cut
            yield outputs.part(start, end), up_to[end - 1] + 1, before
            start, size, cut = end, size - before, None
        size += more
    yield outputs.part(start, len(outputs)), None, size


def portions(pieces: Iterable[Piece], limit: int, *, together: bool) -> Iterator[list[Piece]]:
    """Group pieces into transactions of up to `limit` bytes each, of several partitions only if `together`."""
    portion: list[Piece] = []
    size = 0
    for piece in pieces:
        alone = not together and portion and portion[-1].partition is not piece.partition
        if portion and (alone or size + piece.size > limit):
            yield portion
            portion, size = [], 0
        portion.append(piece)
        size += piece.size
    if portion:
        yield portion
