from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import asyncpg
import pytest

from processor.errors import ConfigError, SetupError
from processor.postgres import migrate
from processor.postgres.migrate import Applied, MigrationSet, read_set

if TYPE_CHECKING:
    from asyncpg import Connection, Record

ORDERS = "CREATE TABLE orders (id integer PRIMARY KEY);\n"
TOTAL = "ALTER TABLE orders ADD COLUMN total numeric;\n"


@pytest.fixture
async def connection(empty_database: str) -> AsyncIterator[Connection[Record]]:
    connection = await asyncpg.connect(empty_database)
    yield connection
    await connection.close()


def shop(folder: Path, consumer: str = "", **files: str) -> MigrationSet:
    """A set named shop; `_0001_orders="…"` becomes the file 0001_orders.sql."""
    folder.mkdir(exist_ok=True)
    for name, sql in files.items():
        (folder / f"{name[1:]}.sql").write_text(sql)
    return read_set(folder, "shop", consumer)


def names(applied: list[Applied]) -> list[tuple[str, int, str]]:
    return [(one.set_name, one.version, one.name) for one in applied]


async def test_missing_files_are_applied_in_order_and_once(connection: Connection[Record], tmp_path: Path) -> None:
    first = shop(tmp_path / "sql", _0001_orders=ORDERS)
    assert names(await migrate.apply(connection, [first])) == [("shop", 1, "orders")]
    both = shop(tmp_path / "sql", _0002_total=TOTAL)
    assert names(await migrate.apply(connection, [both])) == [("shop", 2, "total")]
    assert await migrate.apply(connection, [both]) == []
    await connection.execute("INSERT INTO orders (id, total) VALUES (1, 2)")
    await migrate.require_current(connection, [both])


async def test_each_folder_counts_for_itself(connection: Connection[Record], tmp_path: Path) -> None:
    core = read_set(migrate.core_migrations(), migrate.CORE)
    own = shop(tmp_path / "sql", _0001_orders=ORDERS)
    applied = await migrate.apply(connection, [core, own])
    assert names(applied)[0][:2] == ("processor", 1)
    assert names(applied)[-1] == ("shop", 1, "orders")
    assert await migrate.apply(connection, [core]) == [], "a deployment without the other set goes on"
    assert await connection.fetchval("SELECT count(*) FROM inbox") == 0


async def test_two_processes_starting_together_apply_each_file_once(empty_database: str, tmp_path: Path) -> None:
    slow = f"{ORDERS}SELECT pg_sleep(0.2);\n"
    index = "-- no-transaction\nCREATE INDEX CONCURRENTLY orders_total ON orders (total);\n"
    wanted = [shop(tmp_path / "sql", _0001_orders=slow, _0002_total=TOTAL, _0003_index=index)]
    async with asyncio.timeout(30):
        results = await asyncio.gather(*(migrate.apply(empty_database, wanted) for _ in range(4)))
    assert sorted(len(applied) for applied in results) == [0, 0, 0, 3]


async def test_waiting_for_another_process_is_reported_and_then_each_file(
    connection: Connection[Record], empty_database: str, tmp_path: Path
) -> None:
    other = await asyncpg.connect(empty_database)
    await other.execute("SELECT pg_advisory_lock($1)", migrate.LOCK)
    reports: list[migrate.Progress] = []
    waits = asyncio.Event()

    def report(progress: migrate.Progress) -> None:
        reports.append(progress)
        waits.set()

    wanted = shop(tmp_path / "sql", _0001_orders=ORDERS, _0002_total=TOTAL)
    applying = asyncio.create_task(migrate.apply(connection, [wanted], report))
    async with asyncio.timeout(30):
        await waits.wait()
        await other.close()
        applied = await applying
    assert reports == [migrate.Waiting(), *applied]
    assert [one.label for one in applied] == ["shop/0001_orders", "shop/0002_total"]


async def test_a_file_that_fails_leaves_nothing_and_names_the_line(
    connection: Connection[Record], tmp_path: Path
) -> None:
    broken = f"{ORDERS}\nCREATE TABLE totals (\n    total numerik\n);\n"
    wanted = shop(tmp_path / "sql", _0001_orders=broken, _0002_total=TOTAL)
    with pytest.raises(SetupError) as caught:
        await migrate.apply(connection, [wanted])
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f'{tmp_path}/sql/0001_orders.sql, line 4: type "numerik" does not exist (42704); ')
    assert await connection.fetchval("SELECT to_regclass('orders')") is None
    assert await connection.fetchval("SELECT count(*) FROM processor_migrations") == 0
    mended = shop(tmp_path / "sql", _0001_orders=ORDERS)
    assert len(await migrate.apply(connection, [mended])) == 2, "and the lock was given back"


async def test_files_before_the_failing_one_stay(connection: Connection[Record], tmp_path: Path) -> None:
    wanted = shop(tmp_path / "sql", _0001_orders=ORDERS, _0002_total="SELECT 1/0;")
    with pytest.raises(SetupError, match=r"0002_total\.sql: division by zero \(22012\)"):
        await migrate.apply(connection, [wanted])
    status = await migrate.status(connection, [wanted])
    assert [one.version for one in status.applied] == [1]
    assert [one.version for one in status.pending] == [2]


async def test_a_file_may_not_end_its_own_transaction(connection: Connection[Record], tmp_path: Path) -> None:
    wanted = shop(tmp_path / "sql", _0001_orders="SELECT 1; COMMIT;")
    with pytest.raises(SetupError, match="must not end its transaction"):
        await migrate.apply(connection, [wanted])
    assert await connection.fetchval("SELECT count(*) FROM processor_migrations") == 0


async def test_a_file_without_transaction_holds_one_statement(connection: Connection[Record], tmp_path: Path) -> None:
    two = f"-- no-transaction\n{ORDERS}CREATE INDEX CONCURRENTLY orders_id ON orders (id);"
    with pytest.raises(SetupError, match="one statement only"):
        await migrate.apply(connection, [shop(tmp_path / "sql", _0001_orders=two)])


async def test_an_edited_file_is_refused(connection: Connection[Record], tmp_path: Path) -> None:
    await migrate.apply(connection, [shop(tmp_path / "sql", _0001_orders=ORDERS)])
    other_line_ends = shop(tmp_path / "sql", _0001_orders=ORDERS.replace("\n", "\r\n"))
    await migrate.require_current(connection, [other_line_ends])
    edited = shop(tmp_path / "sql", _0001_orders=ORDERS + "-- harmless?\n")
    for look in (migrate.apply, migrate.status, migrate.require_current):
        with pytest.raises(SetupError, match=r"0001_orders\.sql: was edited after it was applied"):
            await look(connection, [edited])


async def test_a_renamed_file_is_refused(connection: Connection[Record], tmp_path: Path) -> None:
    await migrate.apply(connection, [shop(tmp_path / "a", _0001_orders=ORDERS)])
    with pytest.raises(SetupError, match="the database has 0001_orders under this number"):
        await migrate.apply(connection, [shop(tmp_path / "b", _0001_order=ORDERS)])


async def test_older_code_is_refused_by_a_newer_database(connection: Connection[Record], tmp_path: Path) -> None:
    await migrate.apply(connection, [shop(tmp_path / "new", _0001_orders=ORDERS, _0002_total=TOTAL)])
    older = shop(tmp_path / "old", _0001_orders=ORDERS)
    for look in (migrate.apply, migrate.require_current):
        with pytest.raises(SetupError, match="newer than this code: it has shop/0002_total"):
            await look(connection, [older])


async def test_newer_code_asks_for_migrate(connection: Connection[Record], tmp_path: Path) -> None:
    wanted = [shop(tmp_path / "sql", _0001_orders=ORDERS)]
    with pytest.raises(SetupError, match=r"lacks shop/0001_orders: run `processor migrate CONFIG`"):
        await migrate.require_current(connection, wanted)
    tables = await connection.fetchval("SELECT count(*) FROM pg_tables WHERE schemaname = 'public'")
    assert tables == 0, "looking changes nothing"


async def test_folders_of_the_same_name_that_belong_to_two_services_do_not_know_each_other(
    connection: Connection[Record], tmp_path: Path
) -> None:
    one = shop(tmp_path / "one", "orders", _0001_orders=ORDERS, _0002_total=TOTAL)
    other = shop(tmp_path / "other", "returns", _0001_orders=ORDERS.replace("orders", "returns"))
    assert len(await migrate.apply(connection, [one])) == 2
    assert names(await migrate.apply(connection, [other])) == [("shop", 1, "orders")]
    for wanted in (one, other):
        assert await migrate.apply(connection, [wanted]) == []
        await migrate.require_current(connection, [wanted])
    edited = shop(tmp_path / "other", "returns", _0001_orders="CREATE TABLE others ();")
    with pytest.raises(SetupError, match="was edited after it was applied"):
        await migrate.apply(connection, [edited])


async def test_consumers_that_share_a_folder_apply_each_file_once(
    connection: Connection[Record], tmp_path: Path
) -> None:
    folder = tmp_path / "sql"
    await migrate.apply(connection, [shop(folder, "orders", _0001_orders=ORDERS)])
    await migrate.require_current(connection, [shop(folder, "returns")])
    assert await migrate.apply(connection, [shop(folder, "returns")]) == []
    assert names(await migrate.apply(connection, [shop(folder, "returns", _0002_total=TOTAL)])) == [
        ("shop", 2, "total")
    ]
    assert await migrate.apply(connection, [shop(folder, "orders")]) == []
    older = shop(tmp_path / "older", "orders", _0001_orders=ORDERS)
    with pytest.raises(SetupError, match="newer than this code: it has shop/0002_total"):
        await migrate.require_current(connection, [older])
    for consumer in ("orders", "returns"):
        edited = shop(folder, consumer, _0001_orders=ORDERS + "-- edited")
        with pytest.raises(SetupError, match=r"0001_orders\.sql: was edited after it was applied"):
            await migrate.apply(connection, [edited])


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ({}, "holds no migration"),
        ({"0001_a.sql": ORDERS, "0003_b.sql": TOTAL}, "0003_b.sql: the number 0002 is missing"),
        ({"0002_a.sql": ORDERS}, "0002_a.sql: the number 0001 is missing"),
        ({"0001_a.sql": ORDERS, "0001_b.sql": TOTAL}, "0001_b.sql: the number 0001 is taken"),
        ({"0000_a.sql": ORDERS}, "0000_a.sql: the number 0000 is taken"),
        ({"1_a.sql": ORDERS}, "1_a.sql: not named like"),
        ({"0001-a.sql": ORDERS}, "0001-a.sql: not named like"),
        ({"0001_a.sql": "-- nothing\n"}, "0001_a.sql: holds no SQL"),
    ],
)
def test_a_folder_out_of_order_is_a_configuration_error(tmp_path: Path, files: dict[str, str], says: str) -> None:
    (tmp_path / "README.md").write_text("other files are left alone")
    for name, sql in files.items():
        (tmp_path / name).write_text(sql)
    with pytest.raises(ConfigError) as caught:
        read_set(tmp_path, "shop")
    assert says in str(caught.value)


def test_a_set_is_named_independently_of_where_the_project_lies() -> None:
    assert migrate.set_name(Path("/srv/app/handlers/migrations")) == "handlers"
    assert migrate.set_name(Path("/srv/app/sql/stock")) == "stock"


def command(directory: Path, url: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
    return subprocess.run(
        [sys.executable, "-m", "processor", "migrate", "orders.toml", *arguments],
        cwd=directory,
        env=environ | {"PROCESSOR_DATABASE__URL": url},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


CONFIG = """
consumer = "a"
topic = "b"
handlers.C = "d:e"
kafka.bootstrap_servers = "x"
database.migrations = ["shop"]
"""


@pytest.mark.parametrize("as_json", [False, True])
def test_files_that_were_applied_before_one_failed_are_shown(
    empty_database: str, tmp_path: Path, as_json: bool
) -> None:
    shop(tmp_path / "shop", _0001_orders=ORDERS, _0002_total="SELECT 1/0;")
    (tmp_path / "orders.toml").write_text(CONFIG)
    done = command(tmp_path, empty_database, *(["--json"] if as_json else []))
    assert done.returncode == 1
    assert done.stderr.startswith("error: shop/0002_total.sql: division by zero (22012); ")
    if as_json:
        assert json.loads(done.stdout)["applied"][-1] == {"set": "shop", "version": 1, "name": "orders"}
    else:
        assert done.stdout.splitlines()[-1] == "applied shop/0001_orders"


def test_the_command_shows_then_applies_then_has_nothing_to_do(empty_database: str, tmp_path: Path) -> None:
    shop(tmp_path / "shop", _0001_orders=ORDERS)
    (tmp_path / "orders.toml").write_text(CONFIG)
    dry = command(tmp_path, empty_database, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert "would apply shop/0001_orders" in dry.stdout.splitlines()
    applied = json.loads(command(tmp_path, empty_database, "--json").stdout)["applied"]
    assert applied[-1] == {"set": "shop", "version": 1, "name": "orders"}
    again = command(tmp_path, empty_database)
    assert again.stdout == "nothing to apply: the database is as this code needs it\n"
    (tmp_path / "shop" / "0001_orders.sql").write_text(TOTAL)
    edited = command(tmp_path, empty_database)
    assert edited.returncode == 1
    assert edited.stderr.startswith("error: shop/0001_orders.sql: was edited")
    assert len(edited.stderr.splitlines()) == 1
