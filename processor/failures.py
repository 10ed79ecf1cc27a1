"""What a handler may raise, and what an error means for the batch it happened in."""

from __future__ import annotations

import random
import traceback

from processor import postgres
from processor.records import Failure

RETRIES = 8
FIRST_DELAY_SECONDS = 0.05
LONGEST_DELAY_SECONDS = 5.0
TRACEBACK_CHARS = 8000


class Reject(Exception):
    """Raised by a handler: this message is bad and will stay so. It ends as a failed row, the others go on."""


class Retry(Exception):
    """Raised by a handler: not now. The message is tried again, after so many seconds if given."""

    def __init__(self, reason: str = "", after: float | None = None) -> None:
        super().__init__(reason)
        self.after = after


class Culprit(Exception):
    """One record is known to be at fault: run again without it, up to it and after it."""

    def __init__(self, index: int, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.index = index
        self.failure = failure


class Cut(Exception):
    """The batch has to be committed in two: the records before this one, and those from it on."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class HandlerError(Exception):
    """Wraps what came out of a handler or its queued writes, to tell it from trouble of our own."""


class Unattributed(Exception):
    """Some record is at fault: run again in halves until it stands alone."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.detail)
        self.failure = failure


class Later(Exception):
    """Nobody is at fault: what comes before this record can be committed, the rest is run again after a while."""

    def __init__(self, reason: str, after: float | None = None, index: int = 0, *, counted: bool = True) -> None:
        super().__init__(reason)
        self.after = after
        self.index = index
        self.counted = counted  # False for an outage, which may last as long as it will


def blames_the_message(error: Exception) -> bool:
    """Whether the record whose handler raised this is the one at fault."""
    return not (postgres.is_transient(error) or postgres.is_outage(error) or postgres.is_bystander(error))


def failure_of(error: BaseException) -> Failure:
    if isinstance(error, Reject):
        return Failure("rejected", _text(str(error)))
    state = postgres.sqlstate(error)
    detail = f"{type(error).__name__}: {error}" + (f" (SQLSTATE {state})" if state else "")
    trace = "".join(traceback.format_exception(error))
    return Failure("handler_error", _text(detail), _text(trace[-TRACEBACK_CHARS:]))


def backoff(tries: int, after: float | None = None) -> float:
    """Exponential with full jitter, unless the handler named its own delay."""
    if after is not None:
        return after
    return random.uniform(0, min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2**tries))  # noqa: S311


def _text(text: str) -> str:
    """Text that JSON and Postgres can hold, whatever an exception carried."""
    return text.encode("utf-8", "backslashreplace").decode()
