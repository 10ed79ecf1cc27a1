"""`processor inbox list` and `show`: any message, page by page, also where far more rows are completed than not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit, urlunsplit
from uuid import UUID

import asyncpg
import pytest

from processor.postgres import look_up, standing
from processor.postgres.look_up import Place, Wanted
from tests.conftest import unique
from tests.support import command, sql
from tests.support.shop import NOW, Shop


def run(shop: Shop, *arguments: str, **environ: str) -> Any:
    return command.processor(shop.folder, "inbox", *arguments, environ=environ)


def listed(shop: Shop, *arguments: str) -> Any:
    done = run(shop, "list", "shop.toml", *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    return json.loads(done.stdout)


def ids(shop: Shop, *arguments: str) -> list[str | None]:
    return [message["id"] for message in listed(shop, *arguments)["messages"]]


def test_filters_work_alone_and_together(shop: Shop) -> None:
    shop.row("a", 1, type_="A", key=b"k1")
    shop.row("b", 2, type_="B", status="parked", parked_key=b"k")
    shop.row("c", 3, partition=1, status="discarded")
    shop.row("d", 4, status="completed")
    shop.completed("e", 5)
    ages = "UPDATE inbox SET received_at = $1 WHERE message_id = 'b'"
    sql.execute(shop.database, ages, NOW - timedelta(hours=3))
    assert sorted(ids(shop), key=str) == [None, "a", "b", "c", "d"]
    assert ids(shop, "--id", "e") == ["e"], "its row knows only the key"
    assert set(ids(shop, "--id", "e", "--id", "a", "--id", "nobody")) == {"a", "e"}
    assert ids(shop, "--status", "parked", "--status", "discarded") == ["b", "c"]
    assert ids(shop, "--type", "A") == ids(shop, "--key", "k1") == ids(shop, "--key-hex", "6b31") == ["a"]
    assert ids(shop, "--partition", "1") == ["c"]
    assert ids(shop, "--topic", "elsewhere") == []
    assert ids(shop, "--status", "failed", "--status", "parked", "--until", "1h") == ["b"]
    assert ids(shop, "--status", "failed", "--status", "parked", "--since", "1h") == ["a"]
    done = run(shop, "list", "shop.toml", "--status", "lost")
    assert (done.returncode, "no such status" in done.stderr) == (2, True)


@pytest.mark.parametrize("statuses", [(), ("--status", "failed", "--status", "parked")], ids=["all", "unfinished"])
def test_pages_together_are_the_list_and_each_says_where_the_next_begins(shop: Shop, statuses: tuple[str, ...]) -> None:
    shop.many(5)
    shop.row("p", 9, partition=1, status="parked", parked_key=b"k")
    whole = ids(shop, *statuses)
    assert len(whole) == 6
    found: list[str | None] = []
    after: tuple[str, ...] = ()
    while True:
        page = listed(shop, *statuses, "--limit", "2", *after)
        found += [message["id"] for message in page["messages"]]
        if page["after"] is None:
            break
        after = ("--after", page["after"])
    assert found == whole
    done = run(shop, "list", "shop.toml", *statuses, "--limit", "4")
    assert len(done.stdout.splitlines()) == 5
    assert done.stderr.startswith("there are more: --after ")
    done = run(shop, "list", "shop.toml", *statuses, "--after", "nowhere")
    assert (done.returncode, "no place of a list with these filters" in done.stderr) == (2, True)


def test_show_has_the_stored_result_of_a_completed_message(shop: Shop) -> None:
    shop.completed("m1", 7)
    sql.execute(shop.database, "UPDATE inbox SET result = $1", json.dumps({"invoice": 12}))
    done = run(shop, "show", "shop.toml", "m1", "--json")
    found = json.loads(done.stdout)
    assert (found["id"], found["status"], found["offset"], found["result"]) == ("m1", "completed", 7, {"invoice": 12})
    done = run(shop, "show", "shop.toml", "nobody")
    assert (done.returncode, "no message 'nobody'" in done.stderr) == (1, True)


@pytest.fixture
def viewer(shop: Shop) -> Iterator[str]:
    """The URL of a role that may read our tables, and nothing else."""
    role = unique("viewer").replace("-", "_")
    sql.execute(shop.database, f"CREATE ROLE {role} LOGIN PASSWORD 'x'")
    tables = (
        "processor_migrations, inbox, ledger, unsent, parked_repeats, partition_trouble, "
        "forgotten, pruning, replays, replay_ranges"
    )
    sql.execute(shop.database, f"GRANT SELECT ON {tables} TO {role}")
    parts = urlsplit(shop.database)
    yield urlunsplit(parts._replace(netloc=f"{role}:x@{parts.netloc.rpartition('@')[2]}"))
    sql.execute(shop.database, f"DROP OWNED BY {role}; DROP ROLE {role}")


def test_role_that_may_only_read_is_enough(shop: Shop, viewer: str) -> None:
    shop.row("a", 1)
    for arguments in (("inbox", "list"), ("inbox", "show"), ("status",), ("trace",)):
        words = ["a"] if arguments[-1] in ("show", "trace") else []
        environ = {"PROCESSOR_DATABASE__URL": viewer}
        done = command.processor(shop.folder, *arguments, "shop.toml", *words, environ=environ)
        assert done.returncode == 0, done


ROWS = 200_000


@pytest.fixture
async def big(shop: Shop) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """One row in five hundred did not complete; two consumers share the table."""
    connection = await asyncpg.connect(shop.database)
    await connection.execute(
        """INSERT INTO inbox (key, partition_id, "offset", payload_hash, status, message_id, received_at)
           SELECT gen_random_uuid(), $1::integer + n % 3, n, n,
                  CASE WHEN n % 1000 = 0 THEN 'failed' WHEN n % 1000 = 500 THEN 'parked' ELSE 'completed' END
                  ::inbox_status, CASE WHEN n % 500 = 0 THEN 'm' || n END, now() - n * interval '1 second'
           FROM generate_series(1, $2::integer) n""",
        shop.sources[0],
        ROWS,
    )
    await connection.execute("VACUUM ANALYZE inbox")
    yield connection
    await connection.close()


async def explained(connection: asyncpg.Connection[asyncpg.Record], statement: str, *values: Any) -> dict[str, Any]:
    text = await connection.fetchval(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", *values)
    plan: dict[str, Any] = json.loads(text)[0]["Plan"]
    return plan


def indexes(plan: dict[str, Any]) -> set[str]:
    """That are read; the name of a table stands for a scan of all of it."""
    found = {plan["Index Name"]} if "Index Name" in plan else set()
    if plan["Node Type"] == "Seq Scan":
        found.add(plan["Relation Name"])
    return found.union(*map(indexes, plan.get("Plans", [])))


def pages_read(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


async def test_first_page_of_a_big_inbox_reads_little_more_than_the_page(
    shop: Shop, big: asyncpg.Connection[asyncpg.Record]
) -> None:
    partitions = shop.sources
    every, first = Wanted(), Place()
    plan = await explained(big, look_up.ALL, partitions, *every.arguments(), first.key, 100)
    assert indexes(plan) == {"inbox_pkey"}
    assert pages_read(plan) < 500, "one of the table for each row, and some of the index"
    known = Wanted(keys=[UUID(int=n) for n in range(20)])
    assert indexes(await explained(big, look_up.ALL, partitions, *known.arguments(), first.key, 100)) == {"inbox_pkey"}
    for wanted in (
        Wanted(statuses=("failed", "parked")),
        Wanted(statuses=("parked",), since=NOW - timedelta(hours=20)),
    ):
        behind = (first.status, first.received_at, first.key)
        plan = await explained(big, look_up.UNFINISHED, partitions[0], *wanted.arguments(), *behind, 50)
        assert indexes(plan) == {"inbox_unfinished"}
        assert pages_read(plan) < 300


async def test_status_reads_no_completed_row_of_a_big_inbox(
    shop: Shop, big: asyncpg.Connection[asyncpg.Record]
) -> None:

    plan = await explained(big, standing.UNFINISHED, shop.sources)
    assert indexes(plan) == {"inbox_unfinished"}
    assert "inbox" not in indexes(await explained(big, standing.ESTIMATE))
    estimate = await standing.estimate(big)
    assert abs(estimate.rows - ROWS) < ROWS / 100
    assert estimate.oldest is not None
    found = json.loads(command.processor(shop.folder, "status", "shop.toml", "--json").stdout)
    assert found["inbox_estimate"]["rows"] == estimate.rows


def test_search_that_takes_too_long_ends_with_one_line_that_says_what_to_do(
    shop: Shop, big: asyncpg.Connection[asyncpg.Record]
) -> None:
    done = run(shop, "list", "shop.toml", "--type", "none", "--timeout", "0.001")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: Postgres was asked for 0.001 s and has no answer yet; ")
    assert "--id" in line
    assert "--status" in line
    assert "--timeout" in line
