"""An inbox that has been in use for long: millions of rows of the form that the engine itself writes.

A short real run leaves rows to copy from. Columns are copied as they are, except that key columns get new values of the
same type and length, in no order, and offsets count up. So this needs no change when the engine's table changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from benchmarks import database
from benchmarks.errors import BenchError
from benchmarks.measure import complete
from benchmarks.pgbench import literal
from benchmarks.show import Show
from benchmarks.site import Filled, Site
from benchmarks.subjects import BATCH

if TYPE_CHECKING:
    from benchmarks.database import Connection

CHUNK = 1_000_000
SAMPLE = 1000

COLUMNS = """
    SELECT a.attname AS name, format_type(a.atttypid, a.atttypmod) AS type,
           coalesce(a.attnum = ANY (i.indkey), false) AS key
    FROM pg_attribute a LEFT JOIN pg_index i ON i.indrelid = a.attrelid AND i.indisprimary
    WHERE a.attrelid = 'inbox'::regclass AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum
"""

# Different for each n, in no order, and as long as the value they replace.
NEW_KEYS = {
    "text": "left(md5(n::text) || md5((-n)::text), {length})",
    "bytea": "substr(sha256(n::text::bytea), 1, {length})",
    "uuid": "md5(n::text)::uuid",
    "bigint": "hashint8extended(n, 0)",
}

EMPTY = "TRUNCATE reservations, inbox, ledger, unsent; UPDATE stock SET reserved = 0; VACUUM (FULL, ANALYZE) stock"


@contextmanager
def filled(site: Site, rows: int, show: Show) -> Iterator[Filled]:
    """A database to start runs from, whose inbox has this many rows."""
    with site.job(f"inbox-{rows}", site.feed(SAMPLE).topic) as job:
        complete(site, BATCH, job, SAMPLE)
        group = f"{job.group}-run"

        async def fill(connection: Connection) -> None:
            statement = await _statement(connection, job.group, group)
            for text in EMPTY.split(";"):
                await connection.execute(text)
            for first in range(0, rows, CHUNK):
                show.progress(first, rows)
                await connection.execute(statement, first + 1, min(rows, first + CHUNK), timeout=None)
            # Otherwise autovacuum would start in the middle of a run.
            await connection.execute("VACUUM (FREEZE, ANALYZE) inbox")

        database.connected(job.database, fill)
        yield Filled(job.group, group, rows)


async def _statement(connection: Connection, old_group: str, group: str) -> str:
    columns = await connection.fetch(COLUMNS)
    texts = ", ".join(f'"{column["name"]}"::text' for column in columns)
    row = await connection.fetchrow(f"SELECT {texts} FROM inbox LIMIT 1")  # noqa: S608 - names from the catalogue
    assert row is not None
    values = []
    for column, text in zip(columns, row.values(), strict=True):
        if text is None:
            values.append("NULL")
        elif column["name"] == "offset":
            values.append("n")
        elif column["key"] and text != old_group:
            values.append(_new_key(column["type"], text))
        else:
            values.append(f"{literal(group if text == old_group else text)}::{column['type']}")
    names = ", ".join(f'"{column["name"]}"' for column in columns)
    return (
        f"INSERT INTO inbox ({names}) SELECT {', '.join(values)}"  # noqa: S608 - values that the engine wrote
        " FROM generate_series($1::bigint, $2::bigint) AS n"
    )


def _new_key(type_: str, text: str) -> str:
    if type_ not in NEW_KEYS:
        raise BenchError(f"no rule to make new inbox keys of type {type_}: add it to NEW_KEYS")
    length = (len(text) - len("\\x")) // 2 if type_ == "bytea" else len(text)
    return NEW_KEYS[type_].format(length=length)
