"""Reads of handlers that run at the same time, sent together: one round trip for all that have the same SQL.

The handlers share one connection, which serves one request at a time. While it is busy, what the others want to read
piles up; then it goes out as one request. Before each, what is queued is sent, so a read sees everything that was
queued before it was sent. Reads with equal arguments are never sent together: the second sees what the handler of the
first has queued in answer to it, as if it had come later.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from processor.errors import text_of
from processor.handling.database import Database
from processor.handling.errors import HandlerError, SentTogether
from processor.postgres.sqlstates import StatementTimedOut

if TYPE_CHECKING:
    from processor.handling.queue import Queue
    from processor.postgres.statements import Row

# Passes of the event loop before reads are sent. A handler that wraps its read in a task of its own, as
# `asyncio.wait_for` does, goes on some passes later, and what it queues then has to come before an equal read.
PASSES = 2
PASSES_FOR_EQUALS = 10

_QUERY = re.compile(r"\s*(select|with|values|table)\b", re.IGNORECASE)


class GatheredReadFailed(SentTogether):
    """A read failed that was sent for several messages; who is at fault shows when each is sent alone."""


def _failed(sql: str, error: Exception) -> GatheredReadFailed:
    failed = GatheredReadFailed(f"read {sql.strip()[:60]!r}: {text_of(error)}", sql)
    failed.__cause__ = error
    return failed


@lru_cache(maxsize=4096)
def _is_query(sql: str) -> bool:
    return _QUERY.match(sql) is not None


def _may_be_equal(args: Sequence[Any], others: Sequence[Any]) -> bool:
    try:
        return args == others
    except Exception:
        return True


class _Call:
    def __init__(self, database: Database, sql: str, args: Sequence[Any], *, first_only: bool) -> None:
        self.database = database
        self.sql = sql
        self.args = args
        self.owner = database.owner
        self.first_only = first_only
        self.answer: asyncio.Future[Sequence[Row]] = asyncio.get_running_loop().create_future()


class Reads:
    """What handlers are waiting to read. A task of its own sends it, so that a handler may be ended meanwhile."""

    def __init__(self, queue: Queue, alone: Collection[str] = ()) -> None:
        self._queue = queue
        self._alone = set(
            alone
        )  # statements that are not gathered: they cannot be, or an error has to show its message
        self._waiting: list[_Call] = []
        self._held_back = False  # whether one with equal arguments waits for what has just been sent
        self._sent: Sequence[_Call] = ()
        self._sender: asyncio.Task[None] | None = None

    def gathers(self, sql: str) -> bool:
        return _is_query(sql) and sql not in self._alone

    async def ask(self, database: Database, sql: str, args: Sequence[Any], *, first_only: bool) -> Sequence[Row]:
        self._queue.check(sql)
        call = _Call(database, sql, args, first_only=first_only)
        database.waits_for_turn = True
        self._waiting.append(call)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._send_all())
        try:
            return await call.answer
        finally:
            if call.answer.cancelled() and call in self._sent:
                self._cut_off()

    def _cut_off(self) -> None:
        """Somebody waits no longer for what has been sent: it may take long, and not because of this call."""
        assert self._sender is not None
        if len(self._sent) > 1:
            self._queue.fail(_failed(self._sent[0].sql, RuntimeError("was cut off")))
        if all(call.answer.done() for call in self._sent):
            self._sender.cancel()

    async def end(self) -> None:
        """Wait until the connection is free; to be called when no handler runs any more."""
        if self._sender is not None:
            await asyncio.wait([self._sender])

    async def _send_all(self) -> None:
        try:
            while self._waiting:
                # Whoever can run gets as far as its next read: that is one more that goes out together.
                for _ in range(PASSES_FOR_EQUALS if self._held_back else PASSES):
                    await asyncio.sleep(0)
                async with self._queue.one_at_a_time:
                    await self._send(self._next())
        except asyncio.CancelledError:
            self._fail([*self._sent, *self._waiting], RuntimeError("was cut off"))
            raise
        except Exception as error:
            self._fail([*self._sent, *self._waiting], error)

    def _next(self) -> Sequence[_Call]:
        """Take the calls that are sent next: all that wait with the same SQL, but none with equal arguments."""
        waiting = [call for call in self._waiting if not call.answer.done()]
        if not waiting:
            self._waiting = []
            return ()
        first = waiting[0]
        taken = [first]
        self._held_back = False
        for call in waiting[1:]:
            if call.sql != first.sql or call.first_only != first.first_only or not self.gathers(call.sql):
                continue
            if any(_may_be_equal(call.args, other.args) for other in taken):
                self._held_back = True
            else:
                taken.append(call)
        self._waiting = [call for call in waiting if call not in taken]
        return taken

    async def _send(self, calls: Sequence[_Call]) -> None:
        if not calls:
            return
        sql, first_only = calls[0].sql, calls[0].first_only
        queue, statements = self._queue, self._queue.statements
        self._sent = calls
        try:
            await queue.flush()
            queue.note_sent()
            statement = await statements.prepare(sql)
            gathered = await statements.prepare_gathered(sql, first_only=first_only) if len(calls) > 1 else None
            if gathered is None and len(calls) > 1:
                self._alone.add(sql)
                self._waiting = [*calls[1:], *self._waiting]
                self._sent = calls = calls[:1]
            for call in calls:
                queue.reach(call.owner)
                call.database.waits_for_turn = False
            arguments = [statements.arrays.arguments(statement, call.args) for call in calls]
            statements.busy_wait.begin()
            try:
                if gathered is not None:
                    answers: Sequence[Sequence[Row]] = await gathered.fetch(arguments)
                elif first_only:
                    row = await statement.fetchrow(*arguments[0])
                    answers = [[] if row is None else [row]]
                else:
                    answers = [await statement.fetch(*arguments[0])]
            finally:
                statements.busy_wait.end()
        except Exception as error:
            self._fail(calls, error)
        else:
            for call, answer in zip(calls, answers, strict=True):
                if not call.answer.done():
                    call.answer.set_result(answer)
        self._sent = ()

    def _fail(self, calls: Sequence[_Call], error: Exception) -> None:
        """Let these calls raise the error. If there are several, the batch has to run again to find out whose it is."""
        if type(error) is TimeoutError:
            timed_out = StatementTimedOut("the statement was not answered in time")
            timed_out.__cause__ = error
            error = timed_out
        if len(calls) > 1 and not isinstance(error, HandlerError | SentTogether):
            error = _failed(calls[0].sql, error)
            self._queue.fail(error)
        for call in calls:
            if not call.answer.done():
                call.answer.set_exception(error)


class GatheringDatabase(Database):
    """The database of a handler that runs beside others."""

    def __init__(self, queue: Queue, reads: Reads) -> None:
        super().__init__(queue)
        self._reads = reads

    async def fetch(self, sql: str, *args: Any) -> list[Row]:
        if not self._reads.gathers(sql):
            return await super().fetch(sql, *args)
        return list(await self._reads.ask(self, sql, args, first_only=False))

    async def fetchrow(self, sql: str, *args: Any) -> Row | None:
        if not self._reads.gathers(sql):
            return await super().fetchrow(sql, *args)
        rows = await self._reads.ask(self, sql, args, first_only=True)
        return rows[0] if rows else None

    async def fetchval(self, sql: str, *args: Any) -> Any:
        row = await self.fetchrow(sql, *args)
        return None if row is None else row[0]
