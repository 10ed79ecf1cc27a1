"""A handler's view of the open transaction: statements, and writes that are queued and flushed together.

The one transaction is the engine's, and it ends only with the batch. A handler cannot end it:
transaction commands are refused, and since every statement is prepared, Postgres itself refuses
several statements in one text. After the batch the object is closed for good.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from processor.handling.queue import QUEUED, Line, Queue, Queued, _Arrays, _Copy, _Each, _Group
from processor.postgres.sqlstates import StatementTimedOut

if TYPE_CHECKING:
    from processor.postgres.statements import Row, Statement


T = TypeVar("T")


class Database:
    """A handler's access to Postgres, inside the transaction that also records the message as done."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._arguments = queue.statements.arrays.arguments
        self._key: object = None
        self._owner: int | None = None
        self.waits_for_turn = False  # for a connection that others use
        self._newest = 0  # the number of the newest group with an ordered write of the current key

    async def execute(self, sql: str, *args: Any) -> str:
        """Run a statement now; return Postgres' command tag, such as `UPDATE 1`."""
        async with self._ready(sql) as statement:
            await statement.fetch(*self._arguments(statement, args))
            return statement.get_statusmsg() or ""

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        async with self._ready(sql) as statement:
            return await statement.fetch(*self._arguments(statement, args))

    async def fetchrow(self, sql: str, *args: Any) -> Row | None:
        async with self._ready(sql) as statement:
            return await statement.fetchrow(*self._arguments(statement, args))

    async def fetchval(self, sql: str, *args: Any) -> Any:
        async with self._ready(sql) as statement:
            return await statement.fetchval(*self._arguments(statement, args))

    def write(self, sql: str, *args: Any) -> Queued:
        """Queue a statement whose answer is not needed; it runs before the next read, or at the end.

        Queued statements with the same SQL run together. What messages with the same key queue keeps its order wherever
        it can matter: among equal statements, and among those that touch the same tables, or tables that foreign keys
        tie together. Between different keys, do not rely on any order.
        """
        return self._put(self._queue.written, sql, _Each, sql, None, args)

    def collect(self, sql: str, *args: Any) -> Queued:
        """Queue the arguments of a statement that takes arrays and runs once for all messages of the batch.

        Each argument becomes an element of the array at its position, so `$1` is the array of all first arguments:
        `db.collect("INSERT INTO t SELECT * FROM unnest($1::text[], $2::integer[])", name, number)`.
        Ordered like `write`.
        """
        if not args:
            raise TypeError("collect() needs at least one argument to gather; without any, use write()")
        return self._put(self._queue.collected, sql, _Arrays, sql, len(args), args)

    def insert(self, table: str, **columns: Any) -> Queued:
        """Queue a row; one COPY sends all rows for the same columns of a table. Ordered like `write`."""
        if not columns:
            raise TypeError(f"insert({table!r}) names no columns; write insert({table!r}, column=value)")
        names = tuple(columns)
        return self._put(self._queue.inserted, (table, names), _Copy, table, names, tuple(columns.values()))

    def _put(
        self, lines: dict[T, Line], name: T, kind: type[_Group], what: str, form: Any, row: tuple[Any, ...]
    ) -> Queued:
        """Add a row to a group of that name that overtakes no other write of the same key."""
        line = lines.get(name)
        if line is None or line.form != form:
            line = self._queue.new_line(kind, what, form)
            lines[name] = line
        group = line.first
        if line.ordered:
            if group.number < self._newest or line.has_several:
                group = self._group_in(line)
            self._newest = group.number
        group.rows.append(row)
        group.owners.append(self._owner)
        return QUEUED

    def _group_in(self, line: Line) -> _Group:
        # What has no key, as a batch or a message without one, keeps its place among equal statements.
        newest = self._newest if isinstance(self._key, tuple) else max(self._newest, line.groups[-1].number)
        return line.group_from(newest) or self._queue.another_group(line)

    # --- for the engine ---

    @property
    def owner(self) -> int | None:
        """The index in the batch of the message that is being served."""
        return self._owner

    def serve(self, key: object, owner: int | None = None) -> None:
        """Set the key of the message for which the next calls are made; `owner` is its index in the batch.

        A key is a tuple; anything else has no other messages. Call it with None at the end: the next lane that serves
        the last key then keeps the order of its writes.
        """
        newest_of_key = self._queue.newest_of_key
        if self._newest:
            newest_of_key[self._key] = self._newest
        self._newest = newest_of_key.get(key, 0)
        self._key = key
        self._owner = owner
        self.waits_for_turn = False

    async def stay_awake(self) -> None:
        """Send a statement: Postgres ends transactions that are idle for too long, and handlers may send none."""
        await self.fetchval("SELECT 1")

    def _ready(self, sql: str) -> _Turn:
        self._queue.check(sql)
        return _Turn(self, self._queue, sql)

    async def prepare(self, sql: str) -> Statement:
        """Prepare a statement that holds the lock; queued writes are sent before it."""
        await self._queue.flush()
        self._queue.reach(self._owner)
        self._queue.note_sent()
        return await self._queue.statements.prepare(sql)


class _Turn:
    """Lets one statement at a time use the one connection. A class, because a generator would make each call slower."""

    def __init__(self, database: Database, queue: Queue, sql: str) -> None:
        self._database = database
        self._queue = queue
        self._sql = sql

    async def __aenter__(self) -> Statement:
        self._database.waits_for_turn = True
        await self._queue.one_at_a_time.acquire()
        self._database.waits_for_turn = False
        try:
            statement = await self._database.prepare(self._sql)
        except BaseException:
            self._queue.one_at_a_time.release()
            raise
        self._queue.statements.busy_wait.begin()
        return statement

    async def __aexit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        self._queue.statements.busy_wait.end()
        self._queue.one_at_a_time.release()
        if type(error) is TimeoutError:
            raise StatementTimedOut("the statement was not answered in time") from error


class Awake:
    """Keeps a transaction from being idle while its handlers wait for something else: Postgres would end it.

    Without it, a handler that takes longer than `idle_in_transaction_timeout_ms`, but stays within its time-out, would
    lose its transaction at every try, and be tried for ever.
    """

    def __init__(self, queue: Queue, seconds: float) -> None:
        self._queue = queue
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._speaking: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._look)

    async def __aexit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        self._timer.cancel()
        if self._speaking is not None:
            if isinstance(error, asyncio.CancelledError):
                self._speaking.cancel()  # like the handlers' own statements; the connection is dropped
            await asyncio.wait([self._speaking])

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._look)
        quiet = time.monotonic() - self._queue.last_sent
        if quiet >= self._seconds and (self._speaking is None or self._speaking.done()):
            self._speaking = self._loop.create_task(self._speak())

    async def _speak(self) -> None:
        async with self._queue.one_at_a_time:
            self._queue.note_sent()
            with suppress(Exception):  # the next statement raises it
                await self._queue.statements.connection.execute("SELECT 1")
