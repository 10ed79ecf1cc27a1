"""What the harness asks Postgres: databases for one run each, and the rows a run left."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

from benchmarks import sql
from benchmarks.check import Pair
from benchmarks.workload import Order

T = TypeVar("T")

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]


@dataclass(frozen=True, slots=True)
class Rows:
    reservations: list[Pair]
    stock: dict[str, int]
    inbox: int | None  # None where the subject has no such table


# Each has 16 MB: more than any run fills.
LOG_FILES = 64


class Server:
    """A Postgres in which databases come and go."""

    def __init__(self, url: str) -> None:
        self.url = url

    def create(self, name: str, template: str | None = None) -> str:
        """A database with the tables of the work, fresh or as in another one; gives its URL."""
        url = urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))
        if template is None:
            self._run(f'CREATE DATABASE "{name}"')
            connected(url, lambda connection: connection.execute(sql.TABLES))
        else:
            self._run(f'CREATE DATABASE "{name}" TEMPLATE "{template}" STRATEGY file_copy')
        self._run("CHECKPOINT")  # or this run would write what earlier ones left in memory
        return url

    def drop(self, name: str) -> None:
        self._run(f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)')

    def set(self, settings: Mapping[str, str]) -> None:
        """Store settings; they take effect when the server is started again."""
        for name, value in settings.items():
            self._run(f"ALTER SYSTEM SET {name} = '{value}'")

    def settle_in(self) -> None:
        """Create the files of the write-ahead log, as on a server that has been up for days.

        Otherwise the subject that logs most would pay for creating most of them.
        """

        async def fill_log(connection: Connection) -> None:
            for _ in range(LOG_FILES):
                await connection.execute("SELECT pg_logical_emit_message(false, 'benchmarks', ''), pg_switch_wal()")
            await connection.execute("CHECKPOINT")

        connected(self.url, fill_log)

    def version(self) -> str:
        return str(connected(self.url, lambda connection: connection.fetchval("SHOW server_version")))

    def _run(self, statement: str) -> None:
        connected(self.url, lambda connection: connection.execute(statement))


def connected(url: str, work: Callable[[Connection], Awaitable[T]]) -> T:
    async def run() -> T:
        connection: Connection = await asyncpg.connect(url)
        try:
            return await work(connection)
        finally:
            await connection.close()

    return asyncio.run(run())


def rows(url: str) -> Rows:
    async def read(connection: Connection) -> Rows:
        found: list[Any] = await connection.fetch("SELECT order_id, sku, quantity FROM reservations")
        stock = await connection.fetch("SELECT sku, reserved FROM stock")
        inbox = None
        if await connection.fetchval("SELECT to_regclass('inbox') IS NOT NULL"):
            inbox = await connection.fetchval("SELECT count(*) FROM inbox")
        return Rows(
            [(row[0], Order(row[1], row[2])) for row in found], {row[0]: row[1] for row in stock if row[1]}, inbox
        )

    return connected(url, read)
