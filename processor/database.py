"""What a handler sees of the open transaction: statements, and writes that are queued and flushed together.

There is one transaction, it is the engine's, and it ends only with the batch. A handler cannot
end it: transaction commands are refused, and since every statement is prepared, Postgres itself
refuses several in one text. After the batch the object is closed for good.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Generator
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncpg import Connection, Record
    from asyncpg.prepared_stmt import PreparedStatement

_TRANSACTION_COMMAND = re.compile(
    r"""(?: \s | ; | \( | --[^\n]*(?:\n|\Z) | /\*.*?\*/ )*
        (begin|start\s+transaction|commit|end|rollback|abort|savepoint|release|prepare\s+transaction
         |set\s+transaction|set\s+session\s+characteristics|discard)\b""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)

_STATEMENTS_KEPT = 256


class TransactionCommandError(Exception):
    """A handler tried to end the engine's transaction or to open one of its own."""


class QueuedWriteFailed(Exception):
    """A queued write failed; the message being served when it ran need not be the one that queued it."""


class Statements:
    """Prepared statements of one connection, the least used forgotten first."""

    def __init__(self, connection: Connection[Record]) -> None:
        self._connection = connection
        self._prepared: OrderedDict[str, PreparedStatement[Record]] = OrderedDict()

    async def prepare(self, sql: str) -> PreparedStatement[Record]:
        statement = self._prepared.get(sql)
        if statement is None:
            statement = self._prepared[sql] = await self._connection.prepare(sql)
            if len(self._prepared) > _STATEMENTS_KEPT:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end(sql)
        return statement

    def forget(self) -> None:
        """After an error: a plan made for a table that has changed since is not worth keeping."""
        self._prepared.clear()


class _Queued:
    """Lets `await db.write(…)` mean the same as `db.write(…)`."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


_QUEUED = _Queued()


@lru_cache(maxsize=4096)
def _is_transaction_command(sql: str) -> bool:
    return _TRANSACTION_COMMAND.match(sql) is not None


class Database:
    """The handler's door to Postgres, inside the transaction that also records the message as done."""

    def __init__(self, statements: Statements) -> None:
        self._statements = statements
        self._one_at_a_time = asyncio.Lock()
        self._open = True
        self._failed: QueuedWriteFailed | None = None
        self._last_sent = asyncio.get_running_loop().time()
        self._groups: list[tuple[str, list[tuple[Any, ...]]]] = []
        self._newest_group_of_sql: dict[str, int] = {}
        self._newest_group_of_key: dict[object, int] = {}
        self._key: object = None
        self._written: list[int] = []  # the groups that the message being served has written to
        self._sent = False  # whether anything was sent to Postgres since then

    async def execute(self, sql: str, *args: Any) -> str:
        """Run a statement now; gives Postgres' command tag, such as `UPDATE 1`."""
        async with self._one_at_a_time:
            statement = await self._ready(sql)
            await statement.fetch(*args)
            return statement.get_statusmsg() or ""

    async def fetch(self, sql: str, *args: Any) -> list[Record]:
        async with self._one_at_a_time:
            return await (await self._ready(sql)).fetch(*args)

    async def fetchrow(self, sql: str, *args: Any) -> Record | None:
        async with self._one_at_a_time:
            return await (await self._ready(sql)).fetchrow(*args)

    async def fetchval(self, sql: str, *args: Any) -> Any:
        async with self._one_at_a_time:
            return await (await self._ready(sql)).fetchval(*args)

    def write(self, sql: str, *args: Any) -> _Queued:
        """Queue a statement whose answer is not needed; it runs before the next read, or at the end.

        Queued statements with the same SQL run together. Those of messages with the same key keep
        their order whatever their SQL; between different keys only the order of equal SQL is kept.
        """
        self._check(sql)
        group = self._newest_group_of_sql.get(sql)
        if group is None or self._newest_group_of_key.get(self._key, -1) > group:
            group = self._newest_group_of_sql[sql] = len(self._groups)
            self._groups.append((sql, []))
        self._groups[group][1].append(args)
        self._newest_group_of_key[self._key] = group
        self._written.append(group)
        return _QUEUED

    # --- for the engine ---

    def serve(self, key: object) -> None:
        """What follows is done for a message with this key."""
        self._key = key
        self._written = []
        self._sent = False

    def withdraw(self) -> bool:
        """Undo what the message being served has queued; False if some of it was already sent."""
        if self._sent:
            return False
        for group in reversed(self._written):
            self._groups[group][1].pop()
        self._written = []
        return True

    def raise_failure(self) -> None:
        """A queued write that failed is gone, so this transaction must fail, whatever a handler made of the error."""
        if self._failed is not None:
            raise self._failed

    async def stay_awake(self, seconds: float) -> None:
        """Postgres ends transactions that are idle for too long: let it hear of us where handlers do not."""
        if asyncio.get_running_loop().time() - self._last_sent > seconds:
            await self.fetchval("SELECT 1")

    async def flush(self) -> None:
        self.raise_failure()
        if not self._groups:
            return
        groups, self._groups = self._groups, []
        self._newest_group_of_sql.clear()
        self._newest_group_of_key.clear()
        self._note_sent()
        for sql, arguments in groups:
            if not arguments:  # withdrawn
                continue
            try:
                statement = await self._statements.prepare(sql)
                if len(arguments) == 1:
                    await statement.fetch(*arguments[0])
                else:
                    await statement.executemany(arguments)
            except Exception as error:
                self._failed = QueuedWriteFailed(f"queued {sql.strip()[:60]!r}: {error}")
                raise self._failed from error

    def close(self) -> None:
        self._open = False

    async def _ready(self, sql: str) -> PreparedStatement[Record]:
        self._check(sql)
        await self.flush()
        self._note_sent()
        return await self._statements.prepare(sql)

    def _note_sent(self) -> None:
        self._sent = True
        self._last_sent = asyncio.get_running_loop().time()

    def _check(self, sql: str) -> None:
        if not self._open:
            raise TransactionCommandError("this Database belongs to a batch that is over; use the one you are given")
        if _is_transaction_command(sql):
            raise TransactionCommandError(f"a handler cannot run {sql.strip()[:40]!r}: the batch owns the transaction")
