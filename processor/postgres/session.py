"""Connections to Postgres that are replaced when they break."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg

from processor.errors import BatchAborted, ConnectionLost, SetupError
from processor.postgres import rights, schemas, sqlstates
from processor.postgres.arrays import Arrays
from processor.postgres.roundtrips import RoundTrips
from processor.postgres.statements import Statements
from processor.settings.database import one_by_one

if TYPE_CHECKING:
    from processor.settings.schema import Settings

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection  # generic only for type checkers

TERMINATE_SECONDS = 5.0

# Two workers in a deadlock on hot rows stand still until Postgres notices it, by default after a whole second. Only a
# role with the right may change this (GRANT SET ON PARAMETER), and a value that somebody has chosen stays.
NOTICE_DEADLOCKS = """
    SELECT set_config('deadlock_timeout', '50ms', false)
    FROM pg_settings
    WHERE name = 'deadlock_timeout' AND source = 'default' AND has_parameter_privilege(name, 'SET')
"""
PARAMETER_PRIVILEGES = 15  # the version of Postgres that has them

# Postgres itself ends idle transactions. But one in the middle of a statement does not count as idle, however long its
# client is silent: that is after asyncpg has prepared a statement and before it runs it, and during a COPY.
END_FROZEN = """
    WITH frozen AS MATERIALIZED (
        SELECT pid FROM pg_stat_activity
        WHERE datname = current_database() AND usename = current_user
          AND application_name = current_setting('application_name') AND pid <> pg_backend_pid()
          AND state = 'active' AND wait_event = 'ClientRead' AND xact_start IS NOT NULL
          AND state_change < now() - $1::interval
    )
    SELECT pid FROM frozen WHERE pg_terminate_backend(pid)
"""


class Session:
    """One connection at a time, replaced when it breaks, for one user at a time.

    If its users are `retried` anyway, an error that may pass becomes BatchAborted.
    """

    def __init__(self, settings: Settings, role: str, *, retried: bool = False) -> None:
        self._settings = settings
        self._role = role
        self._retried = retried
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._met = False  # whether the database has ever accepted a connection
        self.round_trips = RoundTrips()
        self.statements: Statements

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
        """Use the connection. Raises ConnectionLost if none can be made, or if it breaks."""
        async with self._turn:
            connection = await self._connected()
            try:
                yield connection
            except asyncio.CancelledError:
                # A statement was cancelled, maybe a COMMIT: the state of this connection is unknown.
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
                if sqlstates.is_forbidden(error):
                    raise SetupError(rights.lacking(self._settings, error)) from None
                if sqlstates.is_read_only(error):
                    await self.drop()  # this server has become read-only; the next connection may find the writer
                if self._retried and (sqlstates.is_transient(error) or sqlstates.is_outage(error)):
                    raise BatchAborted(f"database ({self._role}): {_one_line(error)}") from error
                raise

    def broken(self, error: BaseException) -> bool:
        """Return whether this error ended the connection, and not only a statement."""
        return self._connection is None or self._connection.is_closed() or sqlstates.is_gone(error)

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

    async def _connected(self) -> Connection:
        if self._connection is None or self._connection.is_closed():
            try:
                connection = await connect(self._settings)
                try:
                    arrays = await Arrays.suited(connection)
                    if connection.get_server_version().major >= PARAMETER_PRIVILEGES:
                        await connection.execute(NOTICE_DEADLOCKS)
                except BaseException:
                    connection.terminate()  # nothing else refers to it yet
                    raise
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                text = self._settings.redact(_one_line(error))
                if not self._met and sqlstates.is_refused(error):
                    raise SetupError(f"{self._settings.source}: database.url: {text}") from None
                raise ConnectionLost(f"database ({self._role}) not reachable: {text}") from None
            self._connection = connection
            self._met = True
            self.round_trips.watch(connection)
            self.statements = Statements(connection, arrays, self.round_trips)
        return self._connection


@cache
def _own(schema: str) -> type[Connection]:
    """Return a class of connections whose statements find our tables in their own schema.

    Handlers' statements are prepared (handling/database.py) and stay unchanged: an unqualified name in them follows
    search_path, even if one of our tables has the same name.
    """

    class OwnSchema(Connection):
        async def execute(self, query: str, *args: Any, **options: Any) -> str:
            return await super().execute(schemas.qualified(query, schema), *args, **options)

        async def fetch(self, query: str, *args: Any, **options: Any) -> Any:
            return await super().fetch(schemas.qualified(query, schema), *args, **options)

        async def fetchrow(self, query: str, *args: Any, **options: Any) -> Any:
            return await super().fetchrow(schemas.qualified(query, schema), *args, **options)

        async def fetchval(self, query: str, *args: Any, **options: Any) -> Any:
            return await super().fetchval(schemas.qualified(query, schema), *args, **options)

        async def copy_to_table(self, table_name: str, **options: Any) -> str:
            return await super().copy_to_table(table_name, schema_name=schema, **options)

    return OwnSchema


async def connect(settings: Settings, **changes: Any) -> Connection:
    """Connect to the first host of the URL that takes writes.

    Each host gets the full time for connecting. If all fail, one ConnectionError names the reason for each.
    """
    kwargs = settings.database.connect_kwargs(settings.consumer) | changes
    if settings.database.schema is not None:
        kwargs["connection_class"] = _own(settings.database.schema)
    hosts = one_by_one(kwargs["dsn"])
    refused = []
    for host, dsn in hosts.items():
        try:
            return await asyncpg.connect(**kwargs | {"dsn": dsn})
        except asyncpg.TargetServerAttributeNotMatched:
            text = "is read-only: a standby, or default_transaction_read_only is on"
        except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            if len(hosts) == 1 or sqlstates.is_refused(error):  # the others would refuse us too
                raise
            text = f"no answer within {kwargs['timeout']:g} s" if isinstance(error, TimeoutError) else _one_line(error)
        refused.append(f"{host}: {text}")
    raise ConnectionError("; ".join(refused))


async def end_frozen(connection: Connection, idle_seconds: float) -> list[int]:
    """End transactions of this deployment whose client has been silent this long; return their backends."""
    return [row["pid"] for row in await connection.fetch(END_FROZEN, timedelta(seconds=idle_seconds))]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
