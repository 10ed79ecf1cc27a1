"""Writes that handlers queue: they are grouped and sent together, and a refused one is traced to its message.

Far from Postgres, the number of groups decides how long a batch takes. A statement that touches nothing in common with
the others of its batch has one group. Any other statement may need more, because what one key queues keeps its order.
"""

from __future__ import annotations

import asyncio
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Generator, Sequence
from enum import Enum, auto
from functools import lru_cache
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from processor.errors import text_of
from processor.handling.errors import HandlerError, SentTogether
from processor.postgres.sqlstates import is_about_data
from processor.postgres.statements import Statements

if TYPE_CHECKING:
    from processor.postgres.footprints import Footprint

_BEFORE_COMMAND = r"(?: \s | ; | \( | --[^\n]*(?:\n|\Z) | /\*.*?\*/ )*"
_TRANSACTION_COMMAND = re.compile(
    _BEFORE_COMMAND
    + r"""(begin|start\s+transaction|commit|end|rollback|abort|savepoint|release|prepare\s+transaction
         |set\s+transaction|set\s+session\s+characteristics|discard)\b""",
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_PLAIN = re.compile(
    _BEFORE_COMMAND + r"(select|values|table|with|insert|update|delete|merge)\b", re.IGNORECASE | re.VERBOSE | re.DOTALL
)


# Writes that may have to be undone are sent in pieces. Small pieces mean that less is sent again; few pieces keep
# Postgres fast, which is slow with more than 64 savepoints in a transaction.
CAREFUL_ROWS = 64


CAREFUL_PIECES = 32


class TransactionCommandError(Exception):
    """A handler tried to end the engine's transaction or to open one of its own."""


class QueuedWriteFailed(SentTogether):
    """A queued write failed; the message being served when it ran may not be the one that queued it."""


class Queued:
    """Lets `await db.write(…)` mean the same as `db.write(…)`."""

    def __await__(self) -> Generator[Any, None, None]:
        return
        yield


QUEUED = Queued()


class _Kind(Enum):
    PLAIN = auto()  # reads and writes tables, and nothing else
    TRANSACTION_COMMAND = auto()
    OTHER = auto()


@lru_cache(maxsize=4096)
def _kind(sql: str) -> _Kind:
    if _TRANSACTION_COMMAND.match(sql):
        return _Kind.TRANSACTION_COMMAND
    return _Kind.PLAIN if _PLAIN.match(sql) and "set_config" not in sql.lower() else _Kind.OTHER


class _Group:
    """Queued calls that are sent together, each with the message that it is for. Withdrawn rows are None."""

    def __init__(self, number: int, what: str, form: Any) -> None:
        self.number = number  # its place in the order of sending
        self.what = what
        self.form = form
        self.rows: list[tuple[Any, ...] | None] = []
        self.owners: list[int | None] = []

    async def send(self, statements: Statements, rows: list[tuple[Any, ...]]) -> None:
        raise NotImplementedError

    @property
    def text(self) -> str:
        """A description for people."""
        return self.what

    def failure(self, error: Exception) -> QueuedWriteFailed:
        failed = QueuedWriteFailed(f"queued {self.text.strip()[:60]!r}: {text_of(error)}", self.what)
        failed.__cause__ = error
        return failed

    @classmethod
    def statement(cls, what: str) -> str:
        """Return a statement that touches what a group of this kind does."""
        return what


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
    """`insert`: the fastest way into Postgres, COPY. `what` is the table, `form` the columns."""

    async def send(self, statements: Statements, rows: list[tuple[Any, ...]]) -> None:
        schema, _, table = self.what.rpartition(".")
        await statements.connection.copy_records_to_table(
            table, records=rows, columns=self.form, schema_name=schema or None
        )

    @property
    def text(self) -> str:
        return f"insert into {self.what}"

    @classmethod
    def statement(cls, what: str) -> str:
        table = ".".join('"' + name.replace('"', '""') + '"' for name in what.rpartition(".")[::2] if name)
        return f"INSERT INTO {table} DEFAULT VALUES"


class Line:
    """The groups of one statement, or of one table and its columns, to which rows may still be added."""

    def __init__(self, kind: type[_Group], what: str, form: Any, *, ordered: bool, first: _Group) -> None:
        self.kind = kind
        self.what = what
        self.form = form
        self.ordered = ordered  # whether the order of a key has to be looked after: other statements touch the same
        self.first = first
        self.groups = [first]
        self.has_several = False

    def group_from(self, number: int) -> _Group | None:
        """Return the earliest group that is sent no earlier than the group of that number."""
        at = bisect_left(self.groups, number, key=attrgetter("number"))
        return self.groups[at] if at < len(self.groups) else None


# Called for a message whose write Postgres refuses; raises if the batch cannot go on without the message.
Refused = Callable[[int, QueuedWriteFailed], None]


class Queue:
    """Writes that were queued in the open transaction and not yet sent; all lanes of the run share it.

    It sends `careful` statements behind savepoints: a refused piece can be undone by itself and sent again in halves
    until the message whose write Postgres refuses is known.
    """

    def __init__(self, statements: Statements, refused: Refused, careful: Collection[str] = ()) -> None:
        self.statements = statements
        self.one_at_a_time = asyncio.Lock()
        self.last_sent = time.monotonic()
        self._refused = refused
        self._careful = careful
        self._reached: set[int | None] = set()  # messages with statements that Postgres has run for good
        self._on_trial: Sequence[int | None] = ()  # messages with writes being sent that may still be undone
        self._open = True
        self._failed: Exception | None = None
        self._groups: list[_Group] = []
        self._sending: list[_Group] = []
        self._last_number = 0
        # The line of each statement, or of each table and its columns. Only checked statements have one.
        self.written: dict[str, Line] = {}
        self.collected: dict[str, Line] = {}
        self.inserted: dict[tuple[str, tuple[str, ...]], Line] = {}
        self.newest_of_key: dict[object, int] = {}  # the number of the newest group with an ordered write of each key
        # What the statements of this run touch, and which of them have to keep the order of each key.
        self._footprints: dict[str, Footprint | None] = {}
        self._ordered: set[str] = set()
        self._knows_names = True

    def new_line(self, kind: type[_Group], what: str, form: Any) -> Line:
        """Begin a line with one group, which is sent after all others."""
        self._check_open()
        if kind is not _Copy:
            self.check(what)
        statement = kind.statement(what)
        if statement not in self._footprints:
            self._compare(statement)
        return Line(kind, what, form, ordered=statement in self._ordered, first=self._new_group(kind, what, form))

    def another_group(self, line: Line) -> _Group:
        """Add a group to a line, because of the order of a key."""
        self.statements.want_footprints(self._footprints)
        group = self._new_group(line.kind, line.what, line.form)
        line.groups.append(group)
        line.has_several = True
        return group

    def _new_group(self, kind: type[_Group], what: str, form: Any) -> _Group:
        self._last_number += 1
        group = kind(self._last_number, what, form)
        self._groups.append(group)
        return group

    def _compare(self, statement: str) -> None:
        """Find out whether a statement that is new to this run touches something in common with the others."""
        footprint = self.statements.footprint(statement) if self._knows_names else None
        if footprint is None and len(self._ordered) == len(self._footprints):  # that is all of them
            self._footprints[statement] = None
            self._ordered.add(statement)
            return
        related = {
            other
            for other, its_footprint in self._footprints.items()
            if footprint is None or its_footprint is None or not footprint.is_apart_from(its_footprint)
        }
        self._footprints[statement] = footprint
        if footprint is None or related:
            self._ordered.add(statement)
        if not related <= self._ordered:
            self._ordered |= related
            self.keep_order()  # of writes that are queued already, nobody has noted for which keys

    def keep_order(self) -> None:
        """Send later writes after all that are queued already, whatever their key."""
        self.written.clear()
        self.collected.clear()
        self.inserted.clear()

    def fail(self, error: Exception) -> None:
        """Let the transaction fail, even if handlers catch the error."""
        self._failed = self._failed or error

    def raise_failure(self) -> None:
        """Raise what failed for several messages at once: it is lost, so the transaction must fail even if caught."""
        if self._failed is not None:
            raise self._failed

    def reach(self, owner: int | None) -> None:
        """Note that Postgres is about to run a statement of this message: its writes cannot be withdrawn any more."""
        self._reached.add(owner)

    def withdraw(self, owner: int) -> bool:
        """Drop the queued writes of a message; return False if Postgres has run some of its statements."""
        if owner in self._reached or owner in self._on_trial:
            return False
        for group in (*self._sending, *self._groups):
            for index, row_owner in enumerate(group.owners):
                if row_owner == owner:
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
        self.statements.round_trips.purpose = "writes"
        for group in self._sending:
            try:
                if group.what in self._careful:
                    await self._send_in_pieces(group)
                elif rows := [row for row in group.rows if row is not None]:
                    self._reached.update(group.owners)
                    await group.send(self.statements, rows)
            except HandlerError as refused:
                self._failed = refused
                raise
            except Exception as error:
                self._failed = group.failure(error)
                raise self._failed from error
            except BaseException:  # cancelled: its outcome is unknown, and the rest was not sent
                self._failed = group.failure(RuntimeError("was cut off"))
                raise
        self._sending = []
        self.statements.round_trips.purpose = "handlers"

    async def _send_in_pieces(self, group: _Group) -> None:
        """Send the rows that are not withdrawn so that a refused one can be undone by itself."""
        size = max(CAREFUL_ROWS, len(group.rows) // CAREFUL_PIECES)
        await self.statements.connection.execute("SAVEPOINT queued")
        for start in range(0, len(group.rows), size):
            await self._send_carefully(group, range(start, min(start + size, len(group.rows))))
        await self.statements.connection.execute("RELEASE SAVEPOINT queued")

    async def _send_carefully(self, group: _Group, among: Sequence[int], *, suspect: bool = False) -> bool:
        """Send the rows at these indexes behind the savepoint; only rows that Postgres refuses are left out.

        Returns whether any was refused. If `suspect`, one of the rows is known to be refused.
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
        # A refused message had all its writes withdrawn: some of these rows may be gone by now.
        others = await self._send_carefully(group, where[middle:], suspect=not first_refused)
        return first_refused or others

    def note_sent(self) -> None:
        self.last_sent = time.monotonic()

    def _check_open(self) -> None:
        if not self._open:
            raise TransactionCommandError("this Database belongs to a batch that is over; use the one you are given")

    def check(self, sql: str) -> None:
        self._check_open()
        kind = _kind(sql)
        if kind is _Kind.TRANSACTION_COMMAND:
            raise TransactionCommandError(f"a handler cannot run {sql.strip()[:40]!r}: the batch owns the transaction")
        if kind is _Kind.OTHER and self._knows_names:
            self._forget_names()

    def _forget_names(self) -> None:
        """From now on, take no statement's footprint for granted: names may mean other tables, by SET or CREATE."""
        self._knows_names = False
        self.statements.doubt_footprints()
        self._footprints = dict.fromkeys(self._footprints)
        self._ordered = set(self._footprints)
        self.keep_order()

    def close(self) -> None:
        self._open = False
        self.keep_order()
        del self._refused  # it refers to our owner: the cycle would keep the batch in memory until garbage collection
