"""Brings the database to the schema this code needs: numbered SQL files, forward only, each applied once.

Each folder is a set with its own numbers, recorded by consumer and name. One advisory lock lets processes that
start together take turns. A file that was applied is history: an edited one is refused, and so is a database
that has files this code does not know, because older code must not run on a newer schema.

Two consumers may share a folder, or have two folders that only bear the same name. The first file decides: where both
recorded the same one, every file counts for both; where the first files differ, the sets have nothing in common.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import asyncpg

from processor.errors import ConfigError, SetupError
from processor.postgres import rights

if TYPE_CHECKING:
    from asyncpg import Record

    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

CORE = "processor"
FILE_NAME = re.compile(r"(\d{4})_([a-z0-9][a-z0-9_]*)\.sql")
NO_TRANSACTION = "-- no-transaction"

# "migrate" in ASCII. Advisory locks share one number space per database: the number only has to be unlikely.
LOCK = 0x6D696772617465
LOCK_POLL_SECONDS = 0.2

CREATE_TABLE = """
    CREATE TABLE IF NOT EXISTS processor_migrations (
        consumer   text        NOT NULL,  -- '' for the processor's own set
        set_name   text        NOT NULL,
        version    integer     NOT NULL,
        name       text        NOT NULL,
        checksum   text        NOT NULL,
        applied_at timestamptz NOT NULL DEFAULT now(),
        PRIMARY KEY (set_name, consumer, version)
    )
"""
TABLE_EXISTS = "SELECT to_regclass('processor_migrations') IS NOT NULL"
SELECT_APPLIED = """
    SELECT consumer, set_name, version, name, checksum FROM processor_migrations
    WHERE set_name = ANY($1::text[]) ORDER BY set_name, version
"""
# A file that was applied for another consumer is recorded for this one, and not applied again.
INSERT_APPLIED = """
    INSERT INTO processor_migrations (consumer, set_name, version, name, checksum) VALUES ($1, $2, $3, $4, $5)
    ON CONFLICT DO NOTHING
"""
SCHEMA_EXISTS = "SELECT to_regnamespace(quote_ident($1)) IS NOT NULL"

# SQLSTATEs: a table, type or function of this name exists already.
TAKEN = ("42P07", "42710", "42723")


@dataclass(frozen=True, slots=True)
class Migration:
    consumer: str
    set_name: str
    version: int
    name: str
    path: Path
    sql: str

    @property
    def label(self) -> str:
        return _label(self.set_name, self.version, self.name)

    @property
    def record(self) -> tuple[str, str, int, str, str]:
        return self.consumer, self.set_name, self.version, self.name, self.checksum

    @property
    def checksum(self) -> str:
        """Computed with plain line ends: a checkout that converts them has edited nothing."""
        return hashlib.sha256(self.sql.replace("\r\n", "\n").encode()).hexdigest()

    @property
    def in_transaction(self) -> bool:
        return NO_TRANSACTION not in [line.strip().lower() for line in self.sql.splitlines()[:5]]


@dataclass(frozen=True, slots=True)
class MigrationSet:
    name: str
    folder: Path
    migrations: tuple[Migration, ...]
    consumer: str = ""  # who owns it; "" for the processor's own set, which all consumers share
    schema: str | None = None  # where its unqualified names are created; None: as search_path says


@dataclass(frozen=True, slots=True)
class Waiting:
    """Another process is applying migrations; this one goes on when that one has finished."""


@dataclass(frozen=True, slots=True)
class Applied:
    set_name: str
    version: int
    name: str
    seconds: float

    @property
    def label(self) -> str:
        return _label(self.set_name, self.version, self.name)


Progress: TypeAlias = Waiting | Applied


@dataclass(frozen=True, slots=True)
class Status:
    """What is applied and what is pending, in the order of application."""

    applied: tuple[Migration, ...]
    pending: tuple[Migration, ...]


def _label(set_name: str, version: int, name: str) -> str:
    return f"{set_name}/{version:04}_{name}"


def core_migrations() -> Path:
    """The processor's own files: inside the installed package, or beside it in a source checkout."""
    package = Path(__file__).parents[1]
    for folder in (package / "migrations", package.parent / "migrations"):
        if folder.is_dir():
            return folder
    raise SetupError(f"{package}: the installation is incomplete: its folder migrations is missing")


def sets(settings: Settings) -> tuple[MigrationSet, ...]:
    """The processor's own set first, then those of `database.migrations` in the order given."""
    found = [core(settings)]
    for folder in settings.database.migrations:
        name = set_name(folder)
        if name in (known.name for known in found):
            raise ConfigError(
                f"{settings.source}: database.migrations: {folder}: a second set named {name};"
                " rename the folder (a folder called migrations is named after the one above it)"
            )
        found.append(read_set(folder, name, settings.consumer))
    return tuple(found)


def core(settings: Settings) -> MigrationSet:
    """The processor's own set."""
    return read_set(core_migrations(), CORE, schema=settings.database.schema)


def set_name(folder: Path) -> str:
    """A name that does not depend on where the project lies: `handlers/migrations` is `handlers`."""
    *above, name = [part for part in folder.parts if part not in ("/", "..")]
    return above[-1] if name == "migrations" and above else name


def read_set(folder: Path, name: str, consumer: str = "", schema: str | None = None) -> MigrationSet:
    """Read a folder's files; they must be numbered 0001, 0002, … without gap or repeat."""
    try:
        paths = sorted(path for path in folder.iterdir() if path.suffix == ".sql")
        migrations = [_read(path, consumer, name) for path in paths]
    except OSError as error:
        raise ConfigError(f"{error.filename}: cannot be read: {error.strerror}") from None
    if not migrations:
        raise ConfigError(f"{folder}: holds no migration; expected files such as 0001_name.sql")
    for expected, migration in enumerate(migrations, start=1):
        if migration.version < expected:
            raise ConfigError(f"{migration.path}: the number {migration.version:04} is taken by another file")
        if migration.version > expected:
            raise ConfigError(f"{migration.path}: the number {expected:04} is missing before it")
    return MigrationSet(name, folder, tuple(migrations), consumer, schema)


async def status(connection: Connection, wanted: Sequence[MigrationSet]) -> Status:
    """Compare without changing anything; SetupError if the database disagrees with the files."""
    rows = await _rows(connection, wanted) if await connection.fetchval(TABLE_EXISTS) else []
    applied: list[Migration] = []
    pending: list[Migration] = []
    for one in wanted:
        recorded = _history(one, [row for row in rows if row["set_name"] == one.name])
        newer = [row for version, row in recorded.items() if version > len(one.migrations)]
        if newer:
            last = f"{one.name}/{newer[-1]['version']:04}_{newer[-1]['name']}"
            raise SetupError(
                f"the database is newer than this code: it has {last}, {one.folder} ends at"
                f" {len(one.migrations):04}; run the newer release"
            )
        for migration in one.migrations:
            row = recorded.get(migration.version)
            if row is None:
                pending.append(migration)
                continue
            _require_unedited(migration, row)
            if any(earlier.set_name == one.name for earlier in pending):
                raise SetupError(f"{migration.path}: is applied, but {pending[-1].path.name} before it is not")
            applied.append(migration)
    return Status(tuple(applied), tuple(pending))


async def _rows(connection: Connection, wanted: Sequence[MigrationSet]) -> list[Record]:
    return await connection.fetch(SELECT_APPLIED, [one.name for one in wanted])


def _history(one: MigrationSet, rows: Sequence[Record]) -> dict[int, Record]:
    """What was applied of a set, for any consumer that shares it from its first file on."""
    firsts = {row["consumer"]: (row["name"], row["checksum"]) for row in rows if row["version"] == 1}
    ours = firsts.get(one.consumer, (one.migrations[0].name, one.migrations[0].checksum))
    shared = [row for row in rows if firsts.get(row["consumer"]) == ours]
    shared.sort(key=lambda row: (row["version"], row["consumer"] == one.consumer))  # our own record wins
    return {row["version"]: row for row in shared}


async def require_current(connection: Connection, wanted: Sequence[MigrationSet]) -> None:
    """Refuse to go on unless exactly these files are applied."""
    pending = (await status(connection, wanted)).pending
    if pending:
        names = ", ".join(migration.label for migration in pending)
        raise SetupError(f"the database lacks {names}: run `processor migrate CONFIG`")


async def apply(
    target: Connection | str,
    wanted: Sequence[MigrationSet],
    report: Callable[[Progress], None] = lambda _progress: None,
) -> list[Applied]:
    """Apply what is missing and return it. Safe to call from many processes at once.

    Each file is reported as soon as it is applied: a later one that fails does not take it back.
    """
    if isinstance(target, str):
        connection = await asyncpg.connect(target)
        try:
            return await apply(connection, wanted, report)
        finally:
            await connection.close()
    async with _locked(target, report):
        await _prepare(target, wanted)
        found = await status(target, wanted)
        recorded = {(row["consumer"], row["set_name"], row["version"]) for row in await _rows(target, wanted)}
        for migration in found.applied:
            if migration.record[:3] not in recorded:
                await target.execute(INSERT_APPLIED, *migration.record)
        schemas = {one.name: one.schema for one in wanted}
        done = []
        for migration in found.pending:
            done.append(await _apply(target, migration, schemas[migration.set_name]))
            report(done[-1])
        return done


async def _prepare(connection: Connection, wanted: Sequence[MigrationSet]) -> None:
    """Create the table of applied migrations, and before it the schema for all our tables."""
    if await connection.fetchval(TABLE_EXISTS):
        return
    (schema,) = [one.schema for one in wanted if one.name == CORE] or [None]
    await rights.require_to_create(connection, schema)
    if schema is not None and not await connection.fetchval(SCHEMA_EXISTS, schema):
        await connection.execute(f'CREATE SCHEMA "{schema}"')
    await connection.execute(CREATE_TABLE)


def _read(path: Path, consumer: str, set_name: str) -> Migration:
    matched = FILE_NAME.fullmatch(path.name)
    if not matched:
        raise ConfigError(f"{path}: not named like 0001_lower_case_name.sql")
    try:
        sql = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None
    if not re.sub(r"--[^\n]*|\s", "", sql):
        raise ConfigError(f"{path}: holds no SQL")
    return Migration(consumer, set_name, int(matched[1]), matched[2], path, sql)


def _require_unedited(migration: Migration, row: Record) -> None:
    if row["name"] != migration.name:
        raise SetupError(
            f"{migration.path}: the database has {row['version']:04}_{row['name']} under this number;"
            " applied files keep number and name"
        )
    if row["checksum"] != migration.checksum:
        raise SetupError(
            f"{migration.path}: was edited after it was applied; restore it, put the change into a new file"
        )


@asynccontextmanager
async def _locked(connection: Connection, report: Callable[[Progress], None]) -> AsyncIterator[None]:
    # Not pg_advisory_lock: a statement that waits holds a snapshot, and CREATE INDEX CONCURRENTLY in the process that
    # holds the lock would wait for that snapshot for ever.
    waiting = False
    while not await connection.fetchval("SELECT pg_try_advisory_lock($1)", LOCK):
        if not waiting:
            report(Waiting())
            waiting = True
        await asyncio.sleep(LOCK_POLL_SECONDS)
    try:
        yield
    finally:
        # The lock ends with its session, so a connection that broke meanwhile needs no unlocking.
        if not connection.is_closed():
            await connection.execute("SELECT pg_advisory_unlock($1)", LOCK)


async def _apply(connection: Connection, migration: Migration, schema: str | None) -> Applied:
    started = time.monotonic()
    try:
        async with _search_path(connection, schema):
            if migration.in_transaction:
                async with connection.transaction(isolation="read_committed"):
                    await _run(connection, migration)
                    if not connection.is_in_transaction():
                        raise SetupError(f"{migration.path}: must not end its transaction itself (COMMIT or ROLLBACK)")
                    await connection.execute(INSERT_APPLIED, *migration.record)
            else:
                await _run(connection, migration)
                await connection.execute(INSERT_APPLIED, *migration.record)
    except asyncpg.PostgresError as error:
        raise SetupError(_failure(migration, error)) from None
    return Applied(migration.set_name, migration.version, migration.name, time.monotonic() - started)


async def _run(connection: Connection, migration: Migration) -> None:
    """Past our connection class, which would qualify names: `ledger` in a file of others need not be our table."""
    await asyncpg.Connection.execute(connection, migration.sql)


@asynccontextmanager
async def _search_path(connection: Connection, schema: str | None) -> AsyncIterator[None]:
    if schema is None:
        yield
        return
    await connection.execute("SELECT set_config('search_path', quote_ident($1), false)", schema)
    try:
        yield
    finally:
        if not connection.is_closed():
            await connection.execute("RESET search_path")


def _failure(migration: Migration, error: asyncpg.PostgresError) -> str:
    line = ""
    if error.position:
        line = f", line {migration.sql.count(chr(10), 0, int(error.position) - 1) + 1}"
    text = " ".join(str(error.message).split())
    left = "nothing of it was applied"
    if not migration.in_transaction:
        left = "it runs without a transaction: look for what it left behind"
        if error.sqlstate == "25001":
            left = "a file without a transaction may hold one statement only"
    if error.sqlstate == "42501":
        left += "; grant the role what it lacks, or migrate as the owner of the tables"
    if error.sqlstate in TAKEN and migration.set_name == CORE:
        left += "; to keep the processor's tables apart from others of the same names, set database.schema"
    return f"{migration.path}{line}: {text} ({error.sqlstate}); {left}"
