"""What errors of Postgres mean: by SQLSTATE, never by text."""

from __future__ import annotations

from collections.abc import Iterator

import asyncpg

# Worth another try as they are: serialization failure, deadlock, lock not available, cancelled, a stale plan.
_TRANSIENT = ("40001", "40P01", "55P03", "57014", "0A000")
# Nobody's fault and not over at once: read-only, out of resources, trouble of the system.
_OUTAGE = ("25006", "53", "58")
# The connection is of no use any more, whatever asyncpg still thinks of it.
_GONE = ("08", "57P", "25P03")
# A statement in a transaction that failed earlier: whoever is told is not who did it.
_BYSTANDER = ("25P02",)
# What was to be stored cannot be: bad values, constraints, limits.
_DATA = ("21", "22", "23", "54")
# A value that can never be stored: of the wrong form, missing, or against a rule about it.
_BAD_VALUE = ("22", "23502", "23514")
# Trying again changes nothing: wrong user, password or database name.
_REFUSED = ("28", "3D000", "42501")


def sqlstate(error: BaseException) -> str | None:
    """Also where a handler has wrapped the error in its own."""
    return next((state for one in chain(error) if (state := _own_state(one))), None)


class StatementTimedOut(TimeoutError):
    """Postgres did not answer a statement in time; a handler's own time-outs are none of these."""


def is_passing(error: BaseException) -> bool:
    """Whether the database is likely to take the same at the next try."""
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
    """The role lacks a right; where a handler has met that, it is its error."""
    return getattr(error, "sqlstate", None) == "42501"


def is_known_key(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) == "23505"


def is_bad_value(error: BaseException) -> bool:
    """Whether it is the value that Postgres refuses, and would refuse again."""
    return _has_state(error, _BAD_VALUE) or any(isinstance(one, asyncpg.DataError) for one in chain(error))


def is_about_data(error: BaseException) -> bool:
    """Postgres refused a value; asyncpg refuses some by itself, before they are sent."""
    return _has_state(error, _DATA) or isinstance(error, asyncpg.DataError | asyncpg.InterfaceError)


def _has_state(error: BaseException, states: tuple[str, ...]) -> bool:
    return any((_own_state(one) or "-").startswith(states) for one in chain(error))


def _own_state(error: BaseException) -> str | None:
    """A handler's own exceptions may have anything under that name."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) and len(state) == 5 and state.isalnum() else None


def chain(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from or while handling, and the members of groups."""
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
