"""Records of one partition that were read ahead and are in no batch yet.

A batch takes spans from the front, whole where it can. From a span that is too long it copies only the records that it
takes. The rest stays in place: cutting the span in two would copy the rest with every batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processor.messages.batch import Span

# The memory that a buffered record takes besides its bytes.
RECORD_OVERHEAD = 600


def memory(spans: Iterable[Span]) -> int:
    """Return the memory that the spans take, in bytes."""
    return sum(span.size + RECORD_OVERHEAD * len(span) for span in spans)


class Buffer:
    def __init__(self) -> None:
        self._spans: deque[Span] = deque()
        self._taken = 0  # records already taken from the first span
        self.records = 0
        self.bytes = 0

    def extend(self, spans: Sequence[Span]) -> None:
        self._spans.extend(spans)
        self.records += sum(map(len, spans))
        self.bytes += memory(spans)

    def take(self, most: int, max_bytes: int) -> list[Span]:
        """Take up to `most` records that begin within `max_bytes`; with a limit above 0 a batch gets at least one."""
        taken: list[Span] = []
        while self._spans and most > 0 and max_bytes > 0:
            span = self._part(most, max_bytes)
            taken.append(span)
            most -= len(span)
            max_bytes -= span.size
        self.records -= sum(map(len, taken))
        self.bytes -= memory(taken)
        return taken

    def clear(self) -> None:
        self._spans.clear()
        self._taken = self.records = self.bytes = 0

    def _part(self, most: int, max_bytes: int) -> Span:
        span, start = self._spans[0], self._taken
        end = min(start + most, len(span))
        if span.size > max_bytes:
            end = start + sum(before < max_bytes for before in accumulate(span.sizes[start : end - 1], initial=0))
        if end == len(span):
            self._spans.popleft()
            self._taken = 0
        else:
            self._taken = end
        return span.part(start, end)
