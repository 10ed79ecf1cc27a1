"""What errors of Postgres mean, by SQLSTATE and never by text."""

from __future__ import annotations

from collections.abc import Iterator

import asyncpg

# The same statement may succeed at once: serialization failure, deadlock, lock not available, cancelled, a stale plan.
_TRANSIENT = ("40001", "40P01", "55P03", "57014", "0A000")
# The server is at fault, and needs time: read-only, out of resources, system errors.
_OUTAGE = ("25006", "53", "58")
# The connection is unusable, even if asyncpg does not know it yet.
_GONE = ("08", "57P", "25P03")
# A statement in a transaction that failed earlier: an earlier statement is at fault.
_BYSTANDER = ("25P02",)
# The data cannot be stored: bad values, constraints, limits.
_DATA = ("21", "22", "23", "54")
# A value that can never be stored: malformed, missing, or against a check.
_BAD_VALUE = ("22", "23502", "23514")
# Trying again does not help: wrong user, password or database name, or a missing right.
_REFUSED = ("28", "3D000", "42501")


def sqlstate(error: BaseException) -> str | None:
    """Return the SQLSTATE of an error, even if a handler has wrapped the error in its own."""
    return next((state for one in chain(error) if (state := _own_state(one))), None)


class StatementTimedOut(TimeoutError):
    """Postgres did not answer a statement in time; a handler's own time-outs are other errors."""


def is_passing(error: BaseException) -> bool:
    """Return whether the database is likely to accept the same at the next try."""
    return _has_state(error, _TRANSIENT) or any(isinstance(one, StatementTimedOut) for one in chain(error))


def is_transient(error: BaseException) -> bool:
    return _has_state(error, _TRANSIENT) or any(isinstance(one, TimeoutError) for one in chain(error))


def is_deadlock(error: BaseException) -> bool:
    return _has_state(error, ("40P01",))


def is_outage(error: BaseException) -> bool:
    return _has_state(error, _OUTAGE)


def is_read_only(error: BaseException) -> bool:
    return _has_state(error, ("25006",))


def is_bystander(error: BaseException) -> bool:
    return _has_state(error, _BYSTANDER)


def is_gone(error: BaseException) -> bool:
    return _has_state(error, _GONE)


def is_refused(error: BaseException) -> bool:
    return _has_state(error, _REFUSED)


def is_forbidden(error: BaseException) -> bool:
    """Return whether the role lacks a right. Wrapped errors do not count: they are the handler's own."""
    return getattr(error, "sqlstate", None) == "42501"


def is_lock_timeout(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) == "55P03"


def is_known_key(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) == "23505"


def is_bad_value(error: BaseException) -> bool:
    """Return whether Postgres refuses the value, and would refuse it again."""
    return _has_state(error, _BAD_VALUE) or any(isinstance(one, asyncpg.DataError) for one in chain(error))


def is_about_data(error: BaseException) -> bool:
    """Return whether a value was refused, by Postgres or, before it was sent, by asyncpg."""
    return _has_state(error, _DATA) or isinstance(error, asyncpg.DataError | asyncpg.InterfaceError)


def _has_state(error: BaseException, states: tuple[str, ...]) -> bool:
    return any((_own_state(one) or "-").startswith(states) for one in chain(error))


def _own_state(error: BaseException) -> str | None:
    """Return an error's own SQLSTATE. A handler's exceptions may have anything under that name."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) and len(state) == 5 and state.isalnum() else None


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, its causes and contexts, and the members of groups."""
    seen: set[int] = set()
    waiting: list[BaseException | None] = [error]
    while waiting:
        one = waiting.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        waiting += [one.__cause__, None if one.__suppress_context__ else one.__context__]
        if isinstance(one, BaseExceptionGroup):
            waiting += one.exceptions
