"""What may become of a part of a batch."""

from __future__ import annotations

from processor.errors import text_of


class Culprit(Exception):
    """One record is known to be at fault."""

    def __init__(self, index: int, error: Exception) -> None:
        super().__init__(text_of(error))
        self.index = index
        self.error = error


class Cut(Exception):
    """The batch has to be committed in two: the records before this one, and those from it on."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class Again(Exception):
    """Nobody is at fault: the same once more, after a moment."""


class HandlerError(Exception):
    """Wraps what came out of a handler or its queued writes, to tell it from trouble of our own."""
