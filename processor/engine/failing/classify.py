"""What an error of a handler means, and how long to wait before the next try.

Errors are distinguished by type and SQLSTATE, never by their text:

    poison     the message will never succeed: it fails at once
    transient  no message is at fault, or not for long: tried again, a bounded number of times
    outage     something that all messages need is down: wait, count no attempt, fail no message
    bug        anything else: tried again like a transient error, since it may be one
"""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING

from processor.errors import Reject, Retry, Unavailable, text_of
from processor.handling.timeouts import HandlerTimedOut
from processor.messages.failure import Failure
from processor.postgres import sqlstates
from processor.settings.importing import error_classes

if TYPE_CHECKING:
    from processor.messages.record import Record
    from processor.settings.schema import RetrySettings, Settings

FIRST_DELAY_SECONDS = 0.05
LONGEST_DELAY_SECONDS = 5.0
TRACEBACK_CHARS = 8000


class Kind(StrEnum):
    POISON = "poison"
    TRANSIENT = "transient"
    OUTAGE = "outage"
    BUG = "bug"


_BUILT_IN: Mapping[type[BaseException], Kind] = {
    Reject: Kind.POISON,
    Retry: Kind.TRANSIENT,
    HandlerTimedOut: Kind.TRANSIENT,
    Unavailable: Kind.OUTAGE,
}


class Judge:
    """Decides what an error means for the message whose handler raised it."""

    def __init__(self, settings: Settings) -> None:
        self._retry = settings.retry
        self._retry_of = {type_: handler.retry for type_, handler in settings.handlers.items() if handler.retry}
        self._states: dict[str, Kind] = {}
        self._types: list[tuple[type[BaseException], Kind]] = []
        named = error_classes(settings)
        for name, kind in settings.failure.classes.items():
            if name in named:
                self._types.append((named[name], Kind(kind)))
            else:
                self._states[name] = Kind(kind)

    def kind(self, error: BaseException) -> Kind:
        """Classify an error; the configuration wins over what is built in."""
        for one in sqlstates.chain(error):
            for type_, kind in self._types:
                if isinstance(one, type_):
                    return kind
        state = sqlstates.sqlstate(error) or ""
        for length in range(len(state), 1, -1):
            if state[:length] in self._states:
                return self._states[state[:length]]
        for type_, kind in _BUILT_IN.items():
            if isinstance(error, type_):
                return kind
        if sqlstates.is_outage(error):
            return Kind.OUTAGE
        if sqlstates.is_transient(error):
            return Kind.TRANSIENT
        return Kind.POISON if sqlstates.is_bad_value(error) else Kind.BUG

    def is_explicit(self, error: BaseException) -> bool:
        """Return whether the handler or the configuration states what the error means."""
        return isinstance(error, tuple(_BUILT_IN)) or any(isinstance(error, type_) for type_, _ in self._types)

    def final_failure(self, record: Record, error: Exception) -> Failure | None:
        """Return why the message fails for good now, or None if it does not, or not yet."""
        kind = self.kind(error)
        if kind is Kind.OUTAGE:
            return None
        if kind is not Kind.POISON and record.attempts + 1 < self._policy(record).attempts:
            return None
        return failure_of(error, kind)

    def delay(self, record: Record, error: Exception) -> float:
        """Return the seconds before the next try: exponential with full jitter, unless the handler named its own."""
        after = named_delay(error)
        if after is not None:
            return after
        policy = self._policy(record)
        longest = min(policy.max_delay_ms, policy.first_delay_ms * 2 ** min(record.attempts, 32)) / 1000
        return random.uniform(0, longest)  # noqa: S311

    def _policy(self, record: Record) -> RetrySettings:
        name = record.message_type.name if record.message_type else ""
        return self._retry_of.get(name, self._retry)


def named_delay(error: BaseException) -> float | None:
    """Return the delay that the error names. An error of somebody else's may have anything under that name."""
    after = getattr(error, "after", None)
    return max(0.0, float(after)) if isinstance(after, int | float) and math.isfinite(after) else None


def failure_of(error: BaseException, kind: Kind) -> Failure:
    if isinstance(error, Reject):
        return Failure("rejected", text_of(error), exception=type(error).__name__)
    state = sqlstates.sqlstate(error)
    detail = f"{type(error).__name__}: {text_of(error)}" + (f" (SQLSTATE {state})" if state else "")
    trace = "".join(traceback.format_exception(error))
    reason = "timed_out" if isinstance(error, HandlerTimedOut) else "handler_error"
    return Failure(reason, detail, trace[-TRACEBACK_CHARS:], str(kind), type(error).__name__, state)


def quarantined(died: int) -> Failure:
    return Failure("quarantined", f"{died} processes died while they tried it", kind=str(Kind.BUG))


def backoff(tries: int) -> float:
    """Return the seconds before the next try of something that is repeated until it works, with full jitter."""
    return random.uniform(0, min(LONGEST_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2 ** min(tries, 32)))  # noqa: S311
