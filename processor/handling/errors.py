"""What the run of a batch's handlers may end with besides a result."""

from __future__ import annotations

from processor.errors import text_of


class HandlerError(Exception):
    """Something came out of a handler, or out of a write that it queued; `index` is the message to blame, if known."""

    def __init__(self, error: Exception, index: int | None = None) -> None:
        super().__init__(text_of(error))
        self.error = error
        self.index = index


class NotYet(Exception):
    """A message cannot be handled in this run, and nobody is to blame: the same once more, after a moment."""
