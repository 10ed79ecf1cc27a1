"""What a handler sees of the open transaction: statements, and writes that are queued and flushed together.

There is one transaction, it is the engine's, and it ends only with the batch. A handler cannot
end it: transaction commands are refused, and since every statement is prepared, Postgres itself
refuses several in one text. After the batch the object is closed for good.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeVar

from processor import failpoints
from processor.blame import Culprit
from processor.errors import text_of
from processor.sqlstates import StatementTimedOut, is_about_data

if TYPE_CHECKING:
    from asyncpg import Connection, Record
    from asyncpg.prepared_stmt import PreparedStatement

    from processor.arrays import Arrays

T = TypeVar("T")

_TRANSACTION_COMMAND = re.compile(
    r"""(?: \s | ; | \( | --[^\n]*(?:\n|\Z) | /\*.*?\*/ )*
        (begin|start\s+transaction|commit|end|rollback|abort|savepoint|release|prepare\s+transaction
         |set\s+transaction|set\s+session\s+characteristics|discard)\b""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)

_STATEMENTS_KEPT = 256
# What may have to be taken back is sent in pieces: the fewer rows, the less is sent again; the fewer pieces, the better
# for Postgres, which is slow with more than 64 savepoints in a transaction.
CAREFUL_ROWS = 64
CAREFUL_PIECES = 32
# An answer that may come within this time is waited for without going to sleep.
SOON_SECONDS = 0.001


class TransactionCommandError(Exception):
    """A handler tried to end the engine's transaction or to open one of its own."""


class QueuedWriteFailed(Exception):
    """A queued write failed; the message being served when it ran need not be the one that queued it."""

    def __init__(self, text: str, what: str) -> None:
        super().__init__(text)
        self.what = what  # the statement, or the table


class Attention:
    """Stays awake for answers that come soon: being woken up takes longer than Postgres does for a small statement.

    Handlers that wait for Postgres message by message gain a third that way. Who has waited longer once sleeps the
    next time.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._began = 0.0
        self._waiting = False
        self._awake = False
        self._soon = True  # as far as the last answer tells

    def begin(self) -> None:
        self._began = time.perf_counter()
        self._waiting = True
        if self._soon and not self._awake:
            self._awake = True
            self._loop.call_soon(self._look)

    def end(self) -> None:
        self._waiting = False
        self._soon = time.perf_counter() - self._began < SOON_SECONDS

    def _look(self) -> None:
        if self._waiting and time.perf_counter() - self._began < SOON_SECONDS:
            self._loop.call_soon(self._look)  # as long as something is to be done, the loop does not sleep
        else:
            self._awake = False


class Statements:
    """Prepared statements of one connection, the least used forgotten first."""

    def __init__(self, connection: Connection[Record], arrays: Arrays) -> None:
        self.connection = connection
        self.arrays = arrays
        self.attention = Attention()
        self._prepared: OrderedDict[str, PreparedStatement[Record]] = OrderedDict()

    async def prepare(self, sql: str) -> PreparedStatement[Record]:
        statement = self._prepared.get(sql)
        if statement is None:
            statement = self._prepared[sql] = await self.connection.prepare(sql)
            failpoints.reach("after_prepare")
            if len(self._prepared) > _STATEMENTS_KEPT:
                self._prepared.popitem(last=False)
        else:
            self._prepared.move_to_end(sql)
        return statement

    def forget(self) -> None:
        """After an error: a plan made for a table that has changed since is not worth keeping."""
        self._prepared.clear()


class Queued:
    """Lets `await db.write(…)` mean the same as `db.write(…)`."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


QUEUED = Queued()


@lru_cache(maxsize=4096)
def _is_transaction_command(sql: str) -> bool:
    return _TRANSACTION_COMMAND.match(sql) is not None


class _Group:
    """Queued calls that are sent together, each with the message it is for. Rows that were withdrawn are None."""

    def __init__(self, number: int, what: str, form: Any) -> None:
        self.number = number  # in the order in which they are sent
        self.what = what
        self.form = form
        self.rows: list[tuple[Any, ...] | None] = []
        self.owners: list[int | None] = []

    async def send(self, statements: Statements, rows: list[tuple[Any, ...]]) -> None:
        raise NotImplementedError

    @property
    def text(self) -> str:
        """For people."""
        return self.what

    def failure(self, error: Exception) -> QueuedWriteFailed:
        failed = QueuedWriteFailed(f"queued {self.text.strip()[:60]!r}: {text_of(error)}", self.what)
        failed.__cause__ = error
        return failed


class _Each(_Group):
    """`write`: the statement runs once per row."""

    async def send(self, statements: Statements, rows: list[tuple[Any, ...]]) -> None:
        statement = await statements.prepare(self.what)
        if len(rows) == 1:
            await statement.fetch(*statements.arrays.arguments(statement, rows[0]))
        else:
            await statement.executemany(rows)


class _Arrays(_Group):
    """`collect`: the statement runs once, with one array per argument."""

    async def send(self, statements: Statements, rows: list[tuple[Any, ...]]) -> None:
        statement = await statements.prepare(self.what)
        columns = list(map(list, zip(*rows, strict=True)))
        await statement.fetch(*statements.arrays.arguments(statement, columns))


class _Copy(_Group):
    """`insert`: COPY, which is what Postgres takes rows by fastest. What is a table, its form the columns."""

    async def send(self, statements: Statements, rows: list[tuple[Any, ...]]) -> None:
        schema, _, table = self.what.rpartition(".")
        await statements.connection.copy_records_to_table(
            table, records=rows, columns=self.form, schema_name=schema or None
        )

    @property
    def text(self) -> str:
        return f"insert into {self.what}"


# Told of a message whose write Postgres refuses; raises if the batch cannot go on without the message.
Refused = Callable[[int, QueuedWriteFailed], None]


class Queue:
    """What was queued in the open transaction and not yet sent; shared by all that serve messages in it.

    With some statements it is careful: what is sent of these can be taken back by itself, so that it can be sent in
    halves until it is known whose write it is that Postgres refuses.
    """

    def __init__(self, statements: Statements, refused: Refused, careful: Collection[str] = ()) -> None:
        self.statements = statements
        self.one_at_a_time = asyncio.Lock()
        self.last_sent = time.monotonic()
        self._refused = refused
        self._careful = careful
        self._reached: set[int | None] = set()  # messages of which Postgres has seen something
        self._on_trial: Sequence[int | None] = ()  # those of which it is seeing something that may be taken back
        self._open = True
        self._failed: Exception | None = None
        self._groups: list[_Group] = []
        self._sending: list[_Group] = []
        self._last_number = 0
        # Of each statement, or table and columns, the newest group. There is none of what has not been checked.
        self.written: dict[str, _Group] = {}
        self.collected: dict[str, _Group] = {}
        self.inserted: dict[tuple[str, tuple[str, ...]], _Group] = {}
        self.newest_of_key: dict[object, int] = {}  # the number of the newest group that something was queued to

    def new_group(self, kind: type[_Group], what: str, form: Any) -> _Group:
        """One that is sent after all others."""
        self.check(what if kind is not _Copy else "")
        self._last_number += 1
        group = kind(self._last_number, what, form)
        self._groups.append(group)
        return group

    def keep_order(self) -> None:
        """What is queued from now on is sent after all that is queued already, whatever its key."""
        self.written.clear()
        self.collected.clear()
        self.inserted.clear()

    def raise_failure(self) -> None:
        """A queued write that failed is gone, so this transaction must fail, whatever a handler made of the error."""
        if self._failed is not None:
            raise self._failed

    def reach(self, owner: int | None) -> None:
        """Postgres is going to see something of this message."""
        self._reached.add(owner)

    def withdraw(self, owner: int) -> bool:
        """Undo what is queued for a message; False if Postgres has seen some of it."""
        if owner in self._reached or owner in self._on_trial:
            return False
        for group in (*self._sending, *self._groups):
            for index, one in enumerate(group.owners):
                if one == owner:
                    group.rows[index] = None
        return True

    async def flush(self) -> None:
        self.raise_failure()
        if not self._groups:
            return
        self._sending, self._groups = self._groups, []
        self.keep_order()
        self.newest_of_key.clear()
        self.note_sent()
        for group in self._sending:
            try:
                if group.what in self._careful:
                    await self._send_in_pieces(group)
                elif rows := [row for row in group.rows if row is not None]:
                    self._reached.update(group.owners)
                    await group.send(self.statements, rows)
            except Culprit as culprit:
                self._failed = culprit
                raise
            except Exception as error:
                self._failed = group.failure(error)
                raise self._failed from error
            except BaseException:  # cut off: what became of it is not known, and the rest was not sent
                self._failed = group.failure(RuntimeError("was cut off"))
                raise
        self._sending = []

    async def _send_in_pieces(self, group: _Group) -> None:
        """Send what is not withdrawn so that whatever is refused can be taken back by itself."""
        size = max(CAREFUL_ROWS, len(group.rows) // CAREFUL_PIECES)
        await self.statements.connection.execute("SAVEPOINT queued")
        for start in range(0, len(group.rows), size):
            await self._send_carefully(group, range(start, min(start + size, len(group.rows))))
        await self.statements.connection.execute("RELEASE SAVEPOINT queued")

    async def _send_carefully(self, group: _Group, among: Sequence[int], *, suspect: bool = False) -> bool:
        """Send the rows in these places behind the savepoint; those that are refused, and nobody else's, stay out.

        Gives whether any was. Of `suspect` ones it is known that one will be.
        """
        where = [index for index in among if group.rows[index] is not None]
        rows = [row for row in map(group.rows.__getitem__, where) if row is not None]
        if not rows:
            return False
        connection = self.statements.connection
        owners = [group.owners[index] for index in where]
        if not suspect or len(rows) == 1:
            try:
                self._on_trial = owners
                try:
                    await group.send(self.statements, rows)
                finally:
                    self._on_trial = ()
            except Exception as error:
                owner = owners[0]
                if not is_about_data(error) or (len(where) == 1 and owner is None):
                    raise
                await connection.execute("ROLLBACK TO SAVEPOINT queued")
                if len(where) == 1:
                    assert owner is not None
                    self._refused(owner, group.failure(error))
                    return True
            else:
                self._reached.update(owners)
                await connection.execute("RELEASE SAVEPOINT queued; SAVEPOINT queued")
                return False
        middle = len(where) // 2
        first_refused = await self._send_carefully(group, where[:middle])
        # Who was refused took everything of its own with it: some of these may be gone by now.
        others = await self._send_carefully(group, where[middle:], suspect=not first_refused)
        return first_refused or others

    def note_sent(self) -> None:
        self.last_sent = time.monotonic()

    def check(self, sql: str) -> None:
        if not self._open:
            raise TransactionCommandError("this Database belongs to a batch that is over; use the one you are given")
        if _is_transaction_command(sql):
            raise TransactionCommandError(f"a handler cannot run {sql.strip()[:40]!r}: the batch owns the transaction")

    def close(self) -> None:
        self._open = False
        self.keep_order()
        del self._refused  # refers to who has us: together they would keep the batch until garbage is collected


class Database:
    """The handler's door to Postgres, inside the transaction that also records the message as done."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue
        self._arguments = queue.statements.arrays.arguments
        self._key: object = None
        self._owner: int | None = None
        self._newest = 0  # the number of the newest group that something was queued to for this key

    async def execute(self, sql: str, *args: Any) -> str:
        """Run a statement now; gives Postgres' command tag, such as `UPDATE 1`."""
        async with self._ready(sql) as statement:
            await statement.fetch(*self._arguments(statement, args))
            return statement.get_statusmsg() or ""

    async def fetch(self, sql: str, *args: Any) -> list[Record]:
        async with self._ready(sql) as statement:
            return await statement.fetch(*self._arguments(statement, args))

    async def fetchrow(self, sql: str, *args: Any) -> Record | None:
        async with self._ready(sql) as statement:
            return await statement.fetchrow(*self._arguments(statement, args))

    async def fetchval(self, sql: str, *args: Any) -> Any:
        async with self._ready(sql) as statement:
            return await statement.fetchval(*self._arguments(statement, args))

    def write(self, sql: str, *args: Any) -> Queued:
        """Queue a statement whose answer is not needed; it runs before the next read, or at the end.

        Queued statements with the same SQL run together. Those of messages with the same key keep
        their order whatever their SQL; between different keys only the order of equal SQL is kept.
        """
        return self._put(self._queue.written, sql, _Each, sql, None, args)

    def collect(self, sql: str, *args: Any) -> Queued:
        """Queue the arguments of a statement that takes arrays, and is run once for all messages of the batch.

        Each argument becomes an element of the array in its place, so `$1` is the array of all first arguments:
        `db.collect("INSERT INTO t SELECT * FROM unnest($1::text[], $2::integer[])", name, number)`.
        Ordered like `write`.
        """
        if not args:
            raise TypeError("collect() needs at least one argument to gather; without any, use write()")
        return self._put(self._queue.collected, sql, _Arrays, sql, len(args), args)

    def insert(self, table: str, **columns: Any) -> Queued:
        """Queue a row; all rows for the same columns of a table are sent in one COPY. Ordered like `write`."""
        if not columns:
            raise TypeError(f"insert({table!r}) names no columns; write insert({table!r}, column=value)")
        names = tuple(columns)
        return self._put(self._queue.inserted, (table, names), _Copy, table, names, tuple(columns.values()))

    def _put(
        self, groups: dict[T, _Group], name: T, kind: type[_Group], what: str, form: Any, row: tuple[Any, ...]
    ) -> Queued:
        """Add to the newest group of that name, unless that would overtake something queued for the same key."""
        group = groups.get(name)
        if group is None or group.number < self._newest or group.form != form:
            group = groups[name] = self._queue.new_group(kind, what, form)
        self._newest = group.number
        group.rows.append(row)
        group.owners.append(self._owner)
        return QUEUED

    # --- for the engine ---

    @property
    def owner(self) -> int | None:
        """The place in the batch of the message that is served."""
        return self._owner

    def serve(self, key: object, owner: int | None = None) -> None:
        """What follows is done for a message with this key; `owner` is its place in the batch.

        None in the end: what was queued for the last key is known to whoever serves it next.
        """
        newest_of_key = self._queue.newest_of_key
        if self._newest:
            newest_of_key[self._key] = self._newest
        self._newest = newest_of_key.get(key, 0)
        self._key = key
        self._owner = owner

    async def stay_awake(self) -> None:
        """Postgres ends transactions that are idle for too long: let it hear of us where handlers do not."""
        await self.fetchval("SELECT 1")

    def _ready(self, sql: str) -> _Turn:
        self._queue.check(sql)
        return _Turn(self, self._queue, sql)

    async def prepare(self, sql: str) -> PreparedStatement[Record]:
        """For a statement whose turn has come: what was queued before it goes first."""
        await self._queue.flush()
        self._queue.reach(self._owner)
        self._queue.note_sent()
        return await self._queue.statements.prepare(sql)


class _Turn:
    """One statement at a time on the one connection. A class, because a generator would make each call dearer."""

    def __init__(self, database: Database, queue: Queue, sql: str) -> None:
        self._database = database
        self._queue = queue
        self._sql = sql

    async def __aenter__(self) -> PreparedStatement[Record]:
        await self._queue.one_at_a_time.acquire()
        try:
            statement = await self._database.prepare(self._sql)
        except BaseException:
            self._queue.one_at_a_time.release()
            raise
        self._queue.statements.attention.begin()
        return statement

    async def __aexit__(self, _type: object, error: BaseException | None, _traceback: object) -> None:
        self._queue.statements.attention.end()
        self._queue.one_at_a_time.release()
        if type(error) is TimeoutError:
            raise StatementTimedOut("the statement was not answered in time") from error


class Awake:
    """Lets Postgres hear of a transaction while its handlers wait for something else: it ends those that are idle.

    Without it, a handler that takes longer than `idle_in_transaction_timeout_ms`, but not too long, would lose its
    transaction at every try, and be tried for ever.
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
                self._speaking.cancel()  # as the handlers' own statements are; the connection is given up
            await asyncio.wait([self._speaking])

    def _look(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._look)
        quiet = time.monotonic() - self._queue.last_sent
        if quiet >= self._seconds and (self._speaking is None or self._speaking.done()):
            self._speaking = self._loop.create_task(self._speak())

    async def _speak(self) -> None:
        async with self._queue.one_at_a_time:
            self._queue.note_sent()
            with suppress(Exception):  # whoever speaks next hears of it
                await self._queue.statements.connection.execute("SELECT 1")
