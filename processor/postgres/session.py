"""Connections to Postgres that come back."""

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
from processor.postgres.statements import Statements
from processor.settings.config import one_by_one

if TYPE_CHECKING:
    from processor.settings.config import Settings

    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]
else:
    Connection = asyncpg.Connection  # which is generic for type checkers alone

TERMINATE_SECONDS = 5.0

# Two workers on the same hot rows stand still until Postgres notices that they are in a deadlock; by default it looks
# after a whole second. Only who may set this does (GRANT SET ON PARAMETER), and nobody's own choice is overruled.
NOTICE_DEADLOCKS = """
    SELECT set_config('deadlock_timeout', '50ms', false)
    FROM pg_settings
    WHERE name = 'deadlock_timeout' AND source = 'default' AND has_parameter_privilege(name, 'SET')
"""
PARAMETER_PRIVILEGES = 15  # the version of Postgres that has them

# Postgres itself ends transactions that are idle. One in the middle of a statement is not, however long its client is
# silent: between preparing a statement and running it, as asyncpg does that, and until all of a COPY has come.
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
    """One connection at a time, replaced when it breaks; one user at a time.

    `retried` says that whoever uses it comes again anyway: then what may pass becomes BatchAborted.
    """

    def __init__(self, settings: Settings, role: str, *, retried: bool = False) -> None:
        self._settings = settings
        self._role = role
        self._retried = retried
        self._connection: Connection | None = None
        self._turn = asyncio.Lock()
        self._met = False  # whether the database has ever let us in
        self.statements: Statements

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Connection]:
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
                if sqlstates.is_forbidden(error):
                    raise SetupError(rights.lacking(self._settings, error)) from None
                if sqlstates.is_read_only(error):
                    await self.drop()  # this server has become a reader; the next connection may find the writer
                if self._retried and (sqlstates.is_transient(error) or sqlstates.is_outage(error)):
                    raise BatchAborted(f"database ({self._role}): {_one_line(error)}") from error
                raise

    def broken(self, error: BaseException) -> bool:
        """Whether this error is the connection's end, rather than a statement's."""
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
                    connection.terminate()  # nobody else knows of it yet
                    raise
            except (OSError, TimeoutError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
                text = self._settings.redact(_one_line(error))
                if not self._met and sqlstates.is_refused(error):
                    raise SetupError(f"{self._settings.source}: database.url: {text}") from None
                raise ConnectionLost(f"database ({self._role}) not reachable: {text}") from None
            self._connection = connection
            self._met = True
            self.statements = Statements(connection, arrays)
        return self._connection


@cache
def _own(schema: str) -> type[Connection]:
    """Connections whose statements find our tables in a schema of their own.

    Those of handlers are prepared (database.py) and left as they are: an unqualified name means to a handler what
    search_path says, even if it is that of one of our tables.
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
    """To the first host of the URL that takes writes. Each has the time for connecting to itself, and what is wrong
    with all of them is said as one ConnectionError."""
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
    """End transactions of this deployment whose client has been silent for so long; gives their backends."""
    return [row["pid"] for row in await connection.fetch(END_FROZEN, timedelta(seconds=idle_seconds))]


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
