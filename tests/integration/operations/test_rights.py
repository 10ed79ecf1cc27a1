"""A role that lacks rights: one line says so, with the GRANT that gives them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from processor.errors import SetupError
from processor.postgres import rights
from tests.integration.conftest import MakeBench
from tests.support import command, sql, statements
from tests.support.bench import Bench, Sent


@pytest.fixture
def clerk(database: str) -> Iterator[str]:
    """The URL of a role that owns nothing and was granted nothing."""
    role = f"clerk_{uuid.uuid4().hex[:8]}"
    sql.execute(database, f"CREATE ROLE {role} LOGIN PASSWORD 'clerk-hunter2'")
    parts = urlsplit(database)
    yield urlunsplit(parts._replace(netloc=f"{role}:clerk-hunter2@{parts.netloc.rpartition('@')[2]}"))
    sql.execute(database, f"DROP OWNED BY {role}; DROP ROLE {role}")


def errors(bench: Bench, url: str, *arguments: str) -> str:
    """The one line that a command ends with; a lack of rights is not a bug."""
    done = command.processor(
        Path.cwd(),
        *arguments,
        str(bench.config),
        environ={
            "PROCESSOR_DATABASE__URL": url,
            "PROCESSOR_LOG_LEVEL": "error",
            "PROCESSOR_LOG_FORMAT": "console",
        },
    )
    assert done.returncode == 1, done
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert "hunter2" not in line
    return line


@pytest.mark.parametrize("hidden", [False, True], ids=["tables", "schema"])
async def test_run_and_check_name_the_grants_that_a_role_lacks_and_these_are_enough(
    bench: MakeBench, clerk: str, hidden: bool
) -> None:
    b = bench("keep_nothing")
    if hidden:
        await b.execute("REVOKE USAGE ON SCHEMA public FROM PUBLIC")
    line = errors(b, clerk, "run")
    checked = command.processor(
        Path.cwd(), "check", str(b.config), "--connect", environ={"PROCESSOR_DATABASE__URL": clerk}
    )
    assert checked.returncode == 1
    assert f"✗ {line.removeprefix('error: ')}" in checked.stdout.splitlines()
    grants = line.partition("lacks rights: ")[2].split("; ")
    assert len(grants) == len(rights.NEEDED) + hidden
    await b.execute(*grants)
    b.send([Sent({"what": "x"}, id="m"), Sent({"what": "x"}, id="m")])
    await b.run_until_done(PROCESSOR_DATABASE__URL=clerk)
    assert (await b.inbox())["m"]["status"] == "completed"


def test_rights_that_are_asked_for_are_enough_for_every_statement(database: str, clerk: str) -> None:
    role = urlsplit(clerk).username
    for table, privileges in rights.NEEDED.items():
        sql.execute(database, f"GRANT {', '.join(privileges)} ON {table} TO {role}")

    async def explain(connection: asyncpg.Connection[asyncpg.Record]) -> dict[str, str]:
        refused = {}
        for where, statement in statements.ours().items():
            try:
                await connection.execute(f"EXPLAIN (GENERIC_PLAN) {statement}")
            except asyncpg.PostgresError as error:
                refused[where] = str(error)
        return refused

    refused = sql.connected(clerk, explain)
    assert (
        refused.pop("processor.postgres.migrate.INSERT_APPLIED") == "permission denied for table processor_migrations"
    )
    assert refused == {}


def test_a_single_right_that_is_missing_is_named_alone(bench: MakeBench, clerk: str) -> None:
    b = bench("keep_nothing")
    role = urlsplit(clerk).username
    sql.execute(b.database, f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    sql.execute(b.database, f"REVOKE DELETE ON unsent FROM {role}")
    assert errors(b, clerk, "run").endswith(f": the role lacks rights: GRANT DELETE ON public.unsent TO {role}")


async def test_right_that_is_revoked_under_way_ends_the_run_with_one_line(bench: MakeBench, clerk: str) -> None:
    b = bench("keep_nothing")
    role = urlsplit(clerk).username
    await b.execute(f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}")
    b.send([Sent({"what": "x"}, id="m")])

    async def run() -> None:
        async with b.running(environ={"PROCESSOR_DATABASE__URL": clerk}):
            await b.done()
            await b.execute(f"REVOKE INSERT ON inbox FROM {role}")
            b.send([Sent({"what": "y"}, id="n")])
            await b.done()

    with pytest.raises(SetupError, match=r"permission denied for table inbox; `processor check .* names the GRANT"):
        await run()


def test_migrate_and_dlq_name_what_is_missing(bench: MakeBench, clerk: str, empty_database: str) -> None:
    b = bench("keep_nothing")
    assert "permission denied for table processor_migrations; `processor check " in errors(b, clerk, "dlq", "list")
    assert "permission denied for table processor_migrations; `processor check " in errors(b, clerk, "migrate")
    empty = urlunsplit(urlsplit(clerk)._replace(path=urlsplit(empty_database).path))
    sql.execute(empty_database, "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    assert f"GRANT CREATE ON SCHEMA public TO {urlsplit(clerk).username}" in errors(b, empty, "migrate")


async def test_role_that_may_not_connect_hears_of_the_grant(bench: MakeBench, clerk: str) -> None:
    b = bench("keep_nothing")
    await b.execute(f"REVOKE CONNECT ON DATABASE {urlsplit(clerk).path[1:]} FROM PUBLIC")
    assert "GRANT CONNECT ON DATABASE" in errors(b, clerk, "run")
    with pytest.raises(asyncpg.InsufficientPrivilegeError):
        await asyncpg.connect(clerk)
