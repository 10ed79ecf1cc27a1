"""Postgres from tests that are not coroutines, whatever event loop may be running around them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg

if TYPE_CHECKING:
    from asyncpg import Connection, Record

T = TypeVar("T")


def connected(url: str, work: Callable[[Connection[Record]], Awaitable[T]]) -> T:
    """Run a coroutine on a connection of its own, in a thread of its own."""

    async def run() -> T:
        connection = await asyncpg.connect(url)
        try:
            return await work(connection)
        finally:
            await connection.close()

    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, run()).result()


def execute(url: str, statement: str, *arguments: Any) -> None:
    connected(url, lambda connection: connection.execute(statement, *arguments))


def fetch(url: str, query: str, *arguments: Any) -> list[Record]:
    return connected(url, lambda connection: connection.fetch(query, *arguments))


def value(url: str, query: str, *arguments: Any) -> Any:
    return connected(url, lambda connection: connection.fetchval(query, *arguments))


def with_database(url: str, name: str) -> str:
    """The same server, another database."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{name}"))


def port_of(url: str) -> int:
    return urlsplit(url).port or 5432


def with_port(url: str, port: int) -> str:
    """The same database by way of another port of this machine, without TLS."""
    parts = urlsplit(url)
    login = parts.netloc.rpartition("@")[0]
    netloc = f"{login}@127.0.0.1:{port}" if login else f"127.0.0.1:{port}"
    return urlunsplit(parts._replace(netloc=netloc, query="sslmode=disable"))
