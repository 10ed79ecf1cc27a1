"""What we count as round trips is what a bystander on the wire sees: a client that speaks again after an answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from processor.postgres.session import Connection, Session
from processor.settings.load import load
from tests.integration.conftest import MakeBench

ROWS = [(n, str(n)) for n in range(5)]


class Wire:
    """Passes everything on, and counts how often the client speaks after it has heard something."""

    def __init__(self, host: str, port: int) -> None:
        self.round_trips = 0
        self._server = (host, port)
        self._answered = True
        self._connections: set[asyncio.Task[Any]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[int]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        async with server:
            yield server.sockets[0].getsockname()[1]
        await asyncio.wait(self._connections)

    async def _connected(self, client: asyncio.StreamReader, to_client: asyncio.StreamWriter) -> None:
        current = asyncio.current_task()
        assert current is not None
        self._connections.add(current)
        answers, to_server = await asyncio.open_connection(*self._server)
        await asyncio.gather(self._pass(client, to_server, self._asked), self._pass(answers, to_client, self._told))

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Callable[[], None]) -> None:
        while data := await reader.read(65536):
            note()
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    def _asked(self) -> None:
        self.round_trips += self._answered
        self._answered = False

    def _told(self) -> None:
        self._answered = True


async def query(session: Session, connection: Connection) -> None:
    await connection.execute("SELECT 1; SELECT 2")


async def fetch(session: Session, connection: Connection) -> None:
    for _ in range(3):
        await connection.fetch("SELECT $1::integer", 1)


async def fetch_of_a_type_that_has_to_be_looked_up(session: Session, connection: Connection) -> None:
    await connection.fetch("SELECT $1::uuid[]", [])


async def prepared(session: Session, connection: Connection) -> None:
    for _ in range(3):
        statement = await session.statements.prepare("INSERT INTO t VALUES ($1, $2)")
        await statement.executemany(ROWS)


async def forgotten(session: Session, connection: Connection) -> None:
    await session.statements.prepare("SELECT 1")
    session.statements.forget()
    await session.statements.prepare("SELECT 2")


async def copy(session: Session, connection: Connection) -> None:
    await connection.copy_records_to_table("t", records=ROWS)


@pytest.mark.parametrize(
    "work",
    [query, fetch, fetch_of_a_type_that_has_to_be_looked_up, prepared, forgotten, copy],
    ids=lambda w: w.__name__,
)
async def test_round_trips_that_are_counted_are_those_on_the_wire(
    bench: MakeBench, work: Callable[[Session, Any], Awaitable[None]]
) -> None:
    b = bench()
    await b.execute("CREATE TABLE t (n integer, text text)")
    url = urlsplit(b.database)
    assert url.hostname is not None
    assert url.port is not None
    wire = Wire(url.hostname, url.port)
    async with wire.listening() as port:
        proxied = url._replace(netloc=f"{url.netloc.rpartition('@')[0]}@127.0.0.1:{port}")
        session = Session(load(b.config, {"PROCESSOR_DATABASE__URL": urlunsplit(proxied)}), "work")
        async with session.use() as connection:
            before = wire.round_trips
            await work(session, connection)
            seen = wire.round_trips - before
        await session.close()
    assert sum(session.round_trips.take().values()) == seen > 0
