"""Connections of commands: opened for one piece of work, with errors in words for the operator who waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import asyncpg

from processor.errors import ProcessorError, SetupError
from processor.postgres import migrate, rights, session
from processor.settings.secrets import hide_password

if TYPE_CHECKING:
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

# What a database that does not answer, or not as it should, may raise.
ERRORS = (OSError, asyncpg.PostgresError, asyncpg.InterfaceError)

# The server refuses every write of a command that only looks.
READ_ONLY = "SELECT set_config('default_transaction_read_only', 'on', false)"
BOUND = "SELECT set_config('statement_timeout', $1, false)"

STATE = """
    SELECT current_setting('server_version') AS version, current_user AS username,
           current_setting('synchronous_commit') <> 'off' AS durable
"""


@dataclass(frozen=True, slots=True)
class Server:
    version: str
    username: str
    durable: bool  # whether a commit is on disk before it is acknowledged


@asynccontextmanager
async def connected(settings: Settings) -> AsyncIterator[Connection]:
    """Without a command timeout: building an index may take long."""
    try:
        connection = await session.connect(settings, command_timeout=None)
    except (*ERRORS, ValueError) as error:
        raise SetupError(unreachable(settings, error)) from None
    try:
        yield connection
    except asyncpg.InsufficientPrivilegeError as error:
        raise SetupError(rights.lacking(settings, error)) from None
    finally:
        await connection.close()


@asynccontextmanager
async def with_tables(settings: Settings) -> AsyncIterator[Connection]:
    """To a database that has the processor's tables as this release knows them."""
    async with connected(settings) as connection:
        await migrate.require_current(connection, [migrate.core(settings)])
        try:
            yield connection
        except ProcessorError:
            raise
        except Exception as error:
            if not connection.is_closed():
                raise
            text = " ".join(settings.redact(str(error)).split())
            raise SetupError(f"the connection to the database was lost: {text}; run the command again") from None


@asynccontextmanager
async def read_only(settings: Settings, seconds: float, advice: str) -> AsyncIterator[Connection]:
    """The same for a command that only looks: it can change nothing, and no statement takes longer than this.

    `advice` is for the one whose statement took too long.
    """
    async with with_tables(settings) as connection:
        await connection.execute(READ_ONLY)
        await connection.execute(BOUND, str(max(1, int(seconds * 1000))))
        try:
            yield connection
        # asyncpg loses its place where one of its own questions, about types, is cut off.
        except (asyncpg.QueryCanceledError, asyncpg.InternalClientError):
            raise SetupError(f"Postgres was asked for {seconds:g} s and has no answer yet; {advice}") from None


async def server(connection: Connection) -> Server:
    row = await connection.fetchrow(STATE)
    assert row is not None
    return Server(**row)


def unreachable(settings: Settings, error: BaseException) -> str:
    """Which database could not be used, why, and what to do about it; without its password."""
    url = hide_password(settings.database.url.get_secret_value())
    reason = " ".join(settings.redact(str(error)).split()) or type(error).__name__
    if isinstance(error, TimeoutError):
        reason = f"no answer within {settings.database.connect_timeout_ms} ms"
    match getattr(error, "sqlstate", None):
        case "28P01" | "28000":
            fix = "check user and password in database.url or database.password_file"
        case "3D000":
            fix = "create the database or correct its name in database.url"
        case "42501":
            fix = "GRANT CONNECT ON DATABASE to this role"
        case "53300":
            fix = "the server has no free connection"
        case _:
            fix = "is the server running, and database.url right?"
    return f"{settings.source}: database.url: cannot connect to {url}: {reason}; {fix}"
