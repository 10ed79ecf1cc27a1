"""What a statement touches: the tables that it reads and writes, and those that foreign keys tie to them.

Two statements that touch nothing in common give the same result in either order, and within one transaction nobody
sees the order. So nothing is lost if queued writes run in another order than they were queued in.

Postgres itself names the tables: while it analyses a statement, it takes a lock on every one of them, and on nothing
else. So a statement is prepared in a transaction of its own, its locks are looked at, and the transaction is rolled
back. What the locks do not show is looked for in the catalogue and in the text: triggers, rules, views, foreign keys,
defaults, and functions that Postgres knows nothing of. Wherever anything is found that cannot be judged, the statement
counts as touching everything.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import asyncpg

from processor.postgres import sqltext

if TYPE_CHECKING:
    from asyncpg import Connection, Record

# A lock is waited for only so long: somebody may be changing a table for hours. Compiling would take longer than all
# the rest.
BEGIN = "BEGIN; SET LOCAL lock_timeout = '100ms'; SET LOCAL jit = off"

# Tables are known by the top of their inheritance, so a partition is the same as the table that it is of.
LOCKED_TABLES = """
    WITH RECURSIVE locked AS MATERIALIZED (
        SELECT relation AS table_id, mode
        FROM pg_locks JOIN pg_class ON pg_class.oid = relation
        WHERE pid = pg_backend_pid() AND locktype = 'relation' AND relkind NOT IN ('i', 'I')
          AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
          AND relnamespace <> 'pg_catalog'::regnamespace
    ), member AS (
        SELECT oid AS table_id, oid AS top FROM pg_class
        WHERE relkind NOT IN ('i', 'I', 't', 'c') AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhrelid = oid)
        UNION
        SELECT inhrelid, top FROM member JOIN pg_inherits ON inhparent = table_id
    ), reference AS (
        SELECT child.top AS child, parent.top AS parent, attname AS key_column
        FROM pg_constraint
        JOIN member child ON child.table_id = conrelid
        JOIN member parent ON parent.table_id = confrelid
        JOIN pg_attribute ON attrelid = confrelid AND attnum = ANY (confkey)
        WHERE contype = 'f'
    ), wanted AS (
        SELECT top FROM member JOIN locked USING (table_id)
        UNION
        SELECT child FROM wanted JOIN reference ON parent = top
    )
    SELECT top::bigint AS id,
           ARRAY (SELECT mode FROM locked JOIN member USING (table_id) WHERE member.top = wanted.top) AS modes,
           ARRAY (SELECT DISTINCT parent::bigint FROM reference WHERE child = top) AS parents,
           ARRAY (SELECT DISTINCT child::bigint FROM reference WHERE parent = top) AS children,
           ARRAY (SELECT DISTINCT lower(key_column) FROM reference WHERE parent = top) AS key_columns,
           ARRAY (
               SELECT DISTINCT refobjid::bigint
               FROM pg_attrdef
               JOIN member ON table_id = adrelid
               JOIN pg_depend ON classid = 'pg_attrdef'::regclass AND objid = pg_attrdef.oid
               JOIN pg_class ON pg_class.oid = refobjid AND refclassid = 'pg_class'::regclass AND relkind = 'S'
               WHERE member.top = wanted.top
           ) AS sequences,
           EXISTS (
               SELECT FROM pg_class JOIN member ON table_id = oid
               WHERE member.top = wanted.top AND (relkind NOT IN ('r', 'p', 'm', 'S') OR relrowsecurity)
           ) AS is_opaque,
           EXISTS (
               SELECT FROM member WHERE member.top = wanted.top AND (
                   EXISTS (SELECT FROM pg_rewrite WHERE ev_class = table_id)
                   OR EXISTS (
                       SELECT FROM pg_trigger
                       JOIN pg_proc ON pg_proc.oid = tgfoid JOIN pg_language ON pg_language.oid = prolang
                       WHERE tgrelid = table_id AND NOT tgisinternal AND (lanname <> 'plpgsql' OR tgqual IS NOT NULL)
                   )
                   OR EXISTS (
                       SELECT FROM pg_constraint JOIN pg_attribute ON attrelid = confrelid AND attnum = ANY (confkey)
                       WHERE confrelid = table_id AND attgenerated <> ''
                   )
               )
           ) AS does_more_when_written,
           ARRAY (
               SELECT DISTINCT prosrc
               FROM pg_trigger JOIN member ON table_id = tgrelid JOIN pg_proc ON pg_proc.oid = tgfoid
               WHERE member.top = wanted.top AND NOT tgisinternal
           ) AS trigger_bodies,
           ARRAY (
               SELECT pg_get_expr(adbin, adrelid) FROM pg_attrdef JOIN member ON table_id = adrelid
               WHERE member.top = wanted.top
               UNION
               SELECT pg_get_expr(conbin, conrelid) FROM pg_constraint JOIN member ON table_id = conrelid
               WHERE member.top = wanted.top AND contype = 'c'
               UNION
               SELECT typdefault FROM pg_attribute JOIN member ON table_id = attrelid
               JOIN pg_type ON pg_type.oid = atttypid
               WHERE member.top = wanted.top AND typtype = 'd' AND typdefault IS NOT NULL
               UNION
               SELECT pg_get_indexdef(indexrelid) FROM pg_index JOIN member ON table_id = indrelid
               WHERE member.top = wanted.top AND (indexprs IS NOT NULL OR indpred IS NOT NULL)
           ) AS expressions
    FROM wanted
"""

# Postgres says of its own functions, and extensions in C say of theirs, whether they keep to their arguments: those
# that touch anything else are not safe in parallel. Functions in other languages may do anything, whatever they say.
#
# Some functions are called without being named: by operators and their classes, by casts, and by checks of domains.
FUNCTIONS = """
    WITH function AS MATERIALIZED (
        SELECT pg_proc.oid, lower(proname) AS name, pronamespace = 'pg_catalog'::regnamespace AS is_builtin,
               pronargs = 1 AND typtype IN ('c', 'p') AS takes_a_row,
               provolatile = 'v' AND proname NOT IN ('random', 'gen_random_uuid', 'uuidv4') AS tells_time,
               proparallel = 's' AND prokind <> 'a' AND lanname IN ('internal', 'c') AS is_harmless,
               pronamespace = 'pg_catalog'::regnamespace AND (proparallel = 's' OR proname IN ('random', 'age'))
                   AS is_harmless_builtin
        FROM pg_proc
        JOIN pg_language ON pg_language.oid = prolang
        LEFT JOIN pg_type ON pg_type.oid = proargtypes[0]
    ), hidden AS (
        SELECT oprcode::oid AS oid FROM pg_operator
        UNION SELECT castfunc FROM pg_cast
        UNION SELECT amproc FROM pg_amproc
        UNION SELECT refobjid
              FROM pg_constraint JOIN pg_depend ON classid = 'pg_constraint'::regclass AND objid = pg_constraint.oid
              WHERE contypid <> 0 AND refclassid = 'pg_proc'::regclass
    ), called AS (
        SELECT * FROM function
        WHERE name = ANY ($1::text[]) OR (name = ANY ($2::text[]) AND takes_a_row AND NOT is_builtin)
        UNION SELECT function.* FROM function JOIN hidden USING (oid) WHERE NOT is_builtin
    )
    SELECT coalesce(bool_and(is_harmless OR is_harmless_builtin), true) AS are_harmless,
           coalesce(bool_or(tells_time), false) AS tell_time
    FROM called
"""
_NEXT_VALUE = re.compile(r"nextval\('[^']*'::regclass\)")  # the sequence is known without it

# Not the id of any table: what is written by whatever gets another answer when it is called later.
CLOCK = 0


@dataclass(frozen=True)
class Footprint:
    """What a statement touches: ids of tables and sequences; the negative id of a table stands for its keys."""

    reads: frozenset[int]
    writes: frozenset[int]

    def is_apart_from(self, other: Footprint) -> bool:
        """Return whether nobody can tell in which order the two statements ran."""
        return not (self.writes & (other.reads | other.writes) or other.writes & self.reads)


async def look_up(connection: Connection[Record], sql: str) -> Footprint | None:
    """Return what a statement touches, or None if that may be anything. No transaction may be open."""
    said = sqltext.read(sql)
    if said is None or "pg_" in sql.lower():
        return None
    await connection.execute(BEGIN)
    functions = None
    try:
        await connection.prepare(sql)
        tables = {row["id"]: row for row in await connection.fetch(LOCKED_TABLES)}
        touched = _Touched(said, tables)
        functions = await connection.fetchrow(FUNCTIONS, *touched.called())
    except (asyncpg.PostgresError, asyncpg.InterfaceError):
        if connection.is_closed():
            raise
    await connection.execute("ROLLBACK")
    if functions is None or not functions["are_harmless"]:
        return None
    return touched.footprint([CLOCK] if functions["tell_time"] else [])


class _Touched:
    """The tables of a statement, with those that foreign keys make it read or write."""

    def __init__(self, said: sqltext.Said, tables: Mapping[int, Any]) -> None:
        self._said = said
        self._tables = tables
        locked = [row for row in tables.values() if row["modes"]]
        self._changed = {row["id"] for row in locked if "RowExclusiveLock" in row["modes"]}
        self._read = {row["id"] for row in locked} - self._changed
        self._rekeyed = {table for table in self._changed if self._may_lose_keys(table)}
        waiting = list(self._rekeyed)
        while waiting:  # rows that refer to what is deleted may be deleted too, or checked
            for child in tables[waiting.pop()]["children"]:
                if child not in self._rekeyed:
                    self._rekeyed.add(child)
                    waiting.append(child)
        self._changed |= self._rekeyed

    def _may_lose_keys(self, table: int) -> bool:
        """Return whether keys of this table, that rows of others may refer to, may be changed or deleted."""
        row = self._tables[table]
        assigned = set(self._said.assigned)
        for body in row["trigger_bodies"]:
            assigned |= sqltext.words(body) or set(row["key_columns"])
        return self._said.change not in ("insert", "update") or not assigned.isdisjoint(row["key_columns"])

    def called(self) -> tuple[list[str], list[str]]:
        """Return the names of functions that may be called, with parentheses or behind a dot."""
        called, dotted = set(self._said.called), set(self._said.dotted)
        texts = [text for table in self._read | self._changed for text in self._tables[table]["expressions"]]
        texts += [text for table in self._changed for text in self._tables[table]["trigger_bodies"]]
        for text in texts:
            more_called, more_dotted = sqltext.names(_NEXT_VALUE.sub("", text))
            called |= more_called
            dotted |= more_dotted
        return list(called), list(dotted)

    def footprint(self, more_writes: Iterable[int]) -> Footprint | None:
        reads, writes = set(self._read), {*self._changed, *more_writes}
        for table in self._read | self._changed:
            if self._tables[table]["is_opaque"]:
                return None
        for table in self._changed:
            row = self._tables[table]
            if row["does_more_when_written"] or any(map(sqltext.may_run_statements, row["trigger_bodies"])):
                return None
            reads.update(-parent for parent in row["parents"])
            writes.update(row["sequences"])
            if self._said.change == "insert" or table in self._rekeyed:
                writes.add(-table)
        return Footprint(frozenset(reads), frozenset(writes))
