"""Errors that a run of a batch's handlers may end with."""

from __future__ import annotations

from processor.errors import text_of


class HandlerError(Exception):
    """A handler, or a write that it queued, raised an error; `index` is the message at fault, if known."""

    def __init__(self, error: Exception, index: int | None = None) -> None:
        super().__init__(text_of(error))
        self.error = error
        self.index = index


class OutOfTurn(HandlerError):
    """A handler's time ran out while it waited for the statements of others: one of those is to blame, if any."""


class SentTogether(Exception):
    """Something was refused that was sent for several messages at once; `what` is the statement, or the table."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__(text)
        self.what = what


class NotYet(Exception):
    """A message cannot be handled in this run, and no message is at fault: the batch is run again after a moment."""
