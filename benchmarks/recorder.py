"""The batch handler, in a process that records every statement it sends to Postgres.

So the limit is measured with exactly the statements that the engine runs. asyncpg's query loggers do not see prepared
statements, so its methods are wrapped. One file per process.
"""

from __future__ import annotations

import functools
import os
import pickle
from collections.abc import AsyncIterable, AsyncIterator, Callable
from pathlib import Path
from typing import Any

import asyncpg
from asyncpg.prepared_stmt import PreparedStatement

from benchmarks.handlers import batch
from benchmarks.recording import COPY, FOLDER

__all__ = ["batch"]

_file = (Path(os.environ[FOLDER]) / f"{os.getpid()}.pickle").open("wb")


def _write(connection: Any, sql: str, arguments: Any) -> None:
    pickle.dump((id(connection), sql, arguments), _file)
    _file.flush()  # the process may be killed


def _wrap(owner: type, name: str, statement: Callable[..., tuple[Any, str, Any] | None]) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    async def recorded(self: Any, *args: Any, **options: Any) -> Any:
        sent = statement(self, *args)
        if sent is not None:
            _write(*sent)
        return await original(self, *args, **options)

    setattr(owner, name, recorded)


def _wrap_copy() -> None:
    original = asyncpg.Connection.copy_to_table

    @functools.wraps(original)
    async def recorded(self: Any, table: str, *, source: AsyncIterable[bytes], **options: Any) -> Any:
        data = b"".join([part async for part in source])
        _write(self, COPY, (table, options, data))
        return await original(self, table, source=_once(data), **options)

    setattr(asyncpg.Connection, original.__name__, recorded)


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


def _refused(name: str) -> Callable[..., None]:
    def refuse(*_: Any) -> None:
        raise NotImplementedError(f"the recorder does not know asyncpg's {name}: extend it")

    return refuse


# `execute` with arguments calls `_execute`, and is recorded there.
_wrap(asyncpg.Connection, "execute", lambda self, sql, *args: None if args else (self, sql, ()))
_wrap(asyncpg.Connection, "_execute", lambda self, sql, args, *_: (self, sql, tuple(args)))
_wrap(
    PreparedStatement,
    "_PreparedStatement__bind_execute",
    lambda self, args, *_: (self._connection, self._query, tuple(args)),
)
_wrap_copy()
_wrap(asyncpg.Connection, "_executemany", _refused("executemany"))
_wrap(PreparedStatement, "executemany", _refused("executemany"))
_wrap(asyncpg.Connection, "copy_records_to_table", _refused("copy_records_to_table"))
