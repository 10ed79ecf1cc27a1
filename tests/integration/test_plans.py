"""Statements of the hot path use the index on a big table, whatever the planner may guess about arrays."""

from __future__ import annotations

from collections.abc import AsyncIterator

import asyncpg
import orjson
import pytest

from processor import inbox, ledger

ROWS = 100_000
BATCH = 500


@pytest.fixture
async def big(database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(database)
    await connection.execute(
        f"""INSERT INTO inbox (consumer, message_id, topic, partition, "offset", status)
            SELECT 'c' || n % 2, 'm' || n, 'orders', n % 4, n, CASE WHEN n % 1000 = 0 THEN 'failed' ELSE 'completed' END
                   ::inbox_status
            FROM generate_series(1, {ROWS}) n"""
    )
    await connection.execute(
        """INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, first_offset, next_offset, owner)
           SELECT 'c' || n % 10, 'topic' || n % 7, n, 1, 'id', 0, 0, 'me' FROM generate_series(1, 5000) n"""
    )
    await connection.execute("ANALYZE inbox, ledger")
    yield connection
    await connection.close()


async def scans(connection: asyncpg.Connection[asyncpg.Record], sql: str, *args: object) -> set[tuple[str, str]]:
    """(how, which table) of every scan that really ran."""
    plan = orjson.loads(await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", *args))
    found: set[tuple[str, str]] = set()

    def visit(node: dict[str, object]) -> None:
        if "Relation Name" in node and "Scan" in str(node["Node Type"]):
            found.add((str(node["Node Type"]), str(node["Relation Name"])))
        for child in node.get("Plans", []):  # type: ignore[attr-defined]
            visit(child)

    visit(plan[0]["Plan"])
    return found


async def test_inbox_statements_use_the_primary_key(big: asyncpg.Connection[asyncpg.Record]) -> None:
    ids = [f"m{n}" for n in range(1, 2 * BATCH, 2)]
    for sql, args in (
        (inbox.LOOK_UP, ("c1", ids)),
        (inbox.TAKE_OVER, ("c1", ids, [None] * BATCH, [None] * BATCH)),
        (inbox.KEEP_RESULTS, ("c1", ids, ["1"] * BATCH)),
    ):
        assert not {scan for scan in await scans(big, sql, *args) if scan == ("Seq Scan", "inbox")}, sql


async def test_ledger_statements_use_the_primary_key(big: asyncpg.Connection[asyncpg.Record]) -> None:
    one = ["topic1"], [1]
    for sql, args in (
        (ledger.RAISE_EPOCH, ("c1", *one, [0], "me")),
        (ledger.ADVANCE, ("c1", *one, [1], [0], [5], [b"x"])),
        (ledger.MARK_SENT, ("c1", *one, [1], [5])),
    ):
        assert not {scan for scan in await scans(big, sql, *args) if scan[0] == "Seq Scan"}, sql
