"""Connections to Postgres that come back, and what its errors mean; by SQLSTATE, never by text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from processor.database import Statements
from processor.errors import BatchAborted, ConnectionLost, SetupError

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from processor.config import Settings

TERMINATE_SECONDS = 5.0

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
    return next((state for one in chain(error) if (state := getattr(one, "sqlstate", None))), None)


def is_transient(error: BaseException) -> bool:
    return _has_state(error, _TRANSIENT) or any(isinstance(one, TimeoutError) for one in chain(error))


def is_deadlock(error: BaseException) -> bool:
    return _has_state(error, ("40P01",))


def is_outage(error: BaseException) -> bool:
    return _has_state(error, _OUTAGE)


def is_bystander(error: BaseException) -> bool:
    return _has_state(error, _BYSTANDER)


def is_known_key(error: BaseException) -> bool:
    return getattr(error, "sqlstate", None) == "23505"


def is_bad_value(error: BaseException) -> bool:
    """Whether it is the value that Postgres refuses, and would refuse again."""
    return _has_state(error, _BAD_VALUE) or any(isinstance(one, asyncpg.DataError) for one in chain(error))


def is_about_data(error: BaseException) -> bool:
    """Postgres refused a value; asyncpg refuses some by itself, before they are sent."""
    return _has_state(error, _DATA) or isinstance(error, asyncpg.DataError | asyncpg.InterfaceError)


def _has_state(error: BaseException, states: tuple[str, ...]) -> bool:
    return any((getattr(one, "sqlstate", None) or "-").startswith(states) for one in chain(error))


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


class Session:
    """One connection at a time, replaced when it breaks; one user at a time.

    `retried` says that whoever uses it comes again anyway: then what may pass becomes BatchAborted.
    """

    def __init__(self, settings: Settings, role: str, *, retried: bool = False) -> None:
        self._settings = settings
        self._kwargs: dict[str, Any] = settings.database.connect_kwargs(settings.consumer)
        self._role = role
        self._retried = retried
        self._connection: Connection[Record] | None = None
        self._turn = asyncio.Lock()
        self._met = False  # whether the database has ever let us in
        self.statements: Statements

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection[Record]]:
        """Raises ConnectionLost if there is no connection to be had, or if it broke under way."""
        async with self._turn:
            connection = await self._connected()
            try:
                yield connection
            except asyncio.CancelledError:
                # A statement was cut off, maybe a COMMIT: nothing is known about this connection any more.
                await self.drop()
                raise
            except Exception as error:
                if isinstance(error, ConnectionLost):
                    await self.drop()
                    raise
                if self.broken(error):
                    await self.drop()
                    raise ConnectionLost(f"database connection ({self._role}) lost: {_one_line(error)}") from error
                self.statements.forget()
                if self._retried and (is_transient(error) or is_outage(error)):
                    raise BatchAborted(f"database ({self._role}): {_one_line(error)}") from error
                raise

    def broken(self, error: BaseException) -> bool:
        """Whether this error is the connection's end, rather than a statement's."""
        return self._connection is None or self._connection.is_closed() or _has_state(error, _GONE)

    async def drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.terminate()

    async def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            try:
                await connection.close(timeout=TERMINATE_SECONDS)
            except (TimeoutError, OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
                connection.terminate()

    async def _connected(self) -> Connection[Record]:
        if self._connection is None or self._connection.is_closed():
            try:
                connection = await asyncpg.connect(**self._kwargs)
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                text = self._settings.redact(_one_line(error))
                if not self._met and _has_state(error, _REFUSED):
                    raise SetupError(f"{self._settings.source}: database.url: {text}") from None
                raise ConnectionLost(f"database ({self._role}) not reachable: {text}") from None
            self._connection = connection
            self._met = True
            self.statements = Statements(connection)
        return self._connection


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
