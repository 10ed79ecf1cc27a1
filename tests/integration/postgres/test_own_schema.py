"""The processor's tables in a schema of their own, in a database whose team has tables of the same names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from processor.postgres import migrate, rights, schemas
from tests.integration.conftest import MakeBench
from tests.support import command, sql, statements
from tests.support.bench import EFFECTS, Bench, Sent

THEIRS = """
    CREATE TABLE ledger (what text NOT NULL, written integer NOT NULL DEFAULT 0);
    CREATE TABLE inbox (what text NOT NULL);
    CREATE TABLE unsent (what text NOT NULL);
    CREATE TYPE inbox_status AS ENUM ('full', 'empty');
"""


@pytest.fixture
def b(bench: MakeBench, empty_database: str, tmp_path: Path) -> Bench:
    folder = tmp_path / "team"
    folder.mkdir()
    (folder / "0001_theirs.sql").write_text(THEIRS)
    (folder / "0002_effects.sql").write_text(EFFECTS)
    made = bench(
        {"T": "keep_books", "F": "rejected", "A": "apply"},
        database={"url": empty_database, "schema": "own", "migrations": [str(folder)]},
    )
    made.database = empty_database
    return made


def run(bench: Bench, *arguments: str) -> str:
    done = command.processor(Path.cwd(), *arguments[:2], str(bench.config), *arguments[2:])
    assert done.returncode == 0, done
    return done.stdout


async def test_tables_of_the_same_names_stay_the_team_s_and_handlers_mean_those(b: Bench) -> None:
    command.processor(Path.cwd(), "migrate", str(b.config))
    where = await b.rows(
        "SELECT schemaname, tablename FROM pg_tables WHERE schemaname IN ('own', 'public') ORDER BY 1, 2"
    )
    assert [(row["schemaname"], row["tablename"]) for row in where] == [
        *(("own", name) for name in sorted({*rights.NEEDED, "processor_migrations"})),
        *(("public", name) for name in ("effects", "inbox", "ledger", "unsent")),
    ]
    again = command.processor(Path.cwd(), "migrate", str(b.config))
    assert again.stdout == "nothing to apply: the database is as this code needs it\n"

    b.send([Sent({"what": f"w{n}"}, id=f"m{n}", key=f"k{n % 7}".encode()) for n in range(300)])
    b.send([Sent({"what": f"w{n}"}, id=f"m{n}") for n in range(20)])  # duplicates
    b.send([Sent({"what": "bad"}, id="bad", type="F"), Sent({"what": "a"}, id="a", type="A")])
    await b.run_until_done()
    everything = sorted(f"w{n}" for n in range(300))
    books = await b.rows("SELECT what, written FROM public.ledger ORDER BY what")
    assert [row["what"] for row in books] == everything
    assert {row["written"] for row in books} == {1}
    for table in ("inbox", "unsent"):
        assert sorted(row["what"] for row in await b.rows(f"SELECT what FROM public.{table}")) == everything
    statuses = await b.rows("SELECT status::text, count(*) FROM own.inbox GROUP BY 1 ORDER BY 1")
    assert [tuple(row.values()) for row in statuses] == [("completed", 301), ("failed", 1)]
    assert await b.rows("SELECT next_offset FROM own.ledger") == [{"next_offset": 322}]

    checked = command.processor(Path.cwd(), "check", str(b.config), "--connect")
    assert "✓ schema: as this code needs it" in checked.stdout, checked
    listed = json.loads(run(b, "dlq", "list", "--json"))
    assert [message["id"] for message in listed["messages"]] == ["bad"]
    async with b.running():
        run(b, "dlq", "redrive", "--all", "--no-wait")
        await b.done()
    run(b, "dlq", "discard", "--all", "--reason", "a test", "--yes")
    found = await b.rows("SELECT status::text FROM own.inbox WHERE key = own.inbox_key($1, 'bad')", b.consumer)
    assert found == [{"status": "discarded"}]


def test_without_a_schema_a_collision_with_the_team_s_tables_is_said_with_what_helps(b: Bench) -> None:
    sql.execute(b.database, THEIRS)
    text = b.config.read_text().replace('schema = "own"\n', "")
    b.config.write_text(text)
    done = command.processor(Path.cwd(), "migrate", str(b.config))
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert 'type "inbox_status" already exists (42710); nothing of it was applied; ' in line
    assert line.endswith("set database.schema")


def test_every_statement_of_ours_means_our_tables(b: Bench) -> None:
    """Prepared where the tables that the bare names lead to have other columns."""
    migrated = command.processor(Path.cwd(), "migrate", str(b.config))
    assert migrated.returncode == 0, migrated

    async def prepare(connection: asyncpg.Connection[asyncpg.Record]) -> dict[str, str]:
        refused = {}
        for where, statement in statements.ours().items():
            try:
                await connection.prepare(schemas.qualified(statement, "own"))
            except asyncpg.PostgresError as error:
                refused[where] = str(error)
        return refused

    assert sql.connected(b.database, prepare) == {}


def test_every_name_that_the_migrations_create_is_known(empty_database: str) -> None:
    core = migrate.read_set(migrate.core_migrations(), migrate.CORE)
    sql.connected(empty_database, lambda connection: migrate.apply(connection, [core]))
    created: list[Any] = sql.fetch(
        empty_database,
        """SELECT relname AS name FROM pg_class WHERE relnamespace = 'public'::regnamespace AND relkind = 'r'
           UNION SELECT typname FROM pg_type WHERE typnamespace = 'public'::regnamespace AND typtype = 'e'
           UNION SELECT proname FROM pg_proc WHERE pronamespace = 'public'::regnamespace""",
    )
    assert {row["name"] for row in created} == set(schemas.OURS)
