"""Connections to Postgres that come back, and what its errors mean; by SQLSTATE, never by text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import asyncpg

from processor.database import Statements
from processor.errors import ConnectionLost, SetupError

if TYPE_CHECKING:
    from asyncpg import Connection, Record

    from processor.config import Settings

TERMINATE_SECONDS = 5.0

# Worth another try as they are: serialization failure, deadlock, lock not available, out of
# resources, cancelled by a time-out, a stale plan.
_TRANSIENT = ("40001", "40P01", "55P03", "53", "57014", "0A000")
# The connection is of no use any more, whatever asyncpg still thinks of it.
_GONE = ("08", "57P", "25P03")
# A statement in a transaction that failed earlier: whoever is told is not who did it.
_BYSTANDER = ("25P02",)
# Trying again changes nothing: wrong user, password or database name.
_REFUSED = ("28", "3D000", "42501")


def sqlstate(error: BaseException) -> str | None:
    return getattr(error, "sqlstate", None)


def is_transient(error: BaseException) -> bool:
    return _has_state(error, _TRANSIENT)


def is_bystander(error: BaseException) -> bool:
    return _has_state(error, _BYSTANDER)


def _has_state(error: BaseException | None, states: tuple[str, ...]) -> bool:
    """Looks through the chain of causes: a handler may have wrapped the error in its own."""
    while error is not None:
        if (sqlstate(error) or "-").startswith(states):
            return True
        error = error.__cause__
    return False


class Session:
    """One connection at a time, replaced when it breaks; one user at a time."""

    def __init__(self, settings: Settings, role: str) -> None:
        self._settings = settings
        self._kwargs: dict[str, Any] = settings.database.connect_kwargs(settings.consumer)
        self._role = role
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
                if self.broken(error):
                    await self.drop()
                    raise ConnectionLost(f"database connection ({self._role}) lost: {_one_line(error)}") from error
                self.statements.forget()
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
