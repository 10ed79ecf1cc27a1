"""Statements of the hot path use the index on a big table, whatever the planner may guess about arrays."""

from __future__ import annotations

from collections.abc import AsyncIterator
from datetime import timedelta

import asyncpg
import orjson
import pytest

from processor.messages import identity
from processor.postgres import claims, inbox, ledger, parked_keys, pruning, recall, repeats

ROWS = 100_000
BATCH = 500


@pytest.fixture
async def big(database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    connection = await asyncpg.connect(database)
    await connection.execute(
        f"""INSERT INTO inbox (key, partition_id, "offset", payload_hash, status)
            SELECT inbox_key('c' || n % 2, 'm' || n), n % 4, n, n,
                   CASE WHEN n % 1000 = 0 THEN 'failed' ELSE 'completed' END::inbox_status
            FROM generate_series(1, {ROWS}) n"""
    )
    await connection.execute(
        """INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions,
                                first_offset, next_offset, owner, slot)
           SELECT 'c' || n % 10, 'topic' || n % 7, n, 1, 'id', 1, 0, 0, 'me', 0 FROM generate_series(1, 5000) n"""
    )
    await connection.execute("INSERT INTO unsent SELECT partition_id, n, 'x' FROM ledger, generate_series(1, 3) n")
    await connection.execute("ANALYZE inbox, ledger, unsent")
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
    key_of = identity.inbox_key("c1")
    known = [key_of(f"m{n}").hex() for n in range(1, 2 * BATCH, 2)]
    new = [key_of(f"new{n}").hex() for n in range(BATCH)]
    numbers = list(range(BATCH))
    texts: list[str | None] = [None] * BATCH
    json, raw = ["{}"] * BATCH, [b"x"] * BATCH
    failed, why = ["failed"] * BATCH, ["bug"] * BATCH
    kept = (
        numbers,
        numbers,
        numbers,
        known,
        texts,
        json,
        raw,
        raw,
        json,
        numbers,
        failed,
        texts,
        raw,
        why,
        why,
        texts,
        texts,
    )
    for sql, args in (
        (claims.CLAIM, (known, numbers, numbers, numbers)),
        (claims.CLAIM, (new, numbers, numbers, numbers)),
        (claims.LOOK_UP, (known, None)),
        (claims.SEEN_AGAIN, (known,)),
        (recall.KNOWN, (known,)),
        (repeats.DONE, (known, numbers)),
        (claims.TAKE_OVER, (known, texts, "me")),
        (inbox.KEEP, (known, *kept)),
        (inbox.KEEP, ([*known[1:], "0" * 32], *kept)),
        (inbox.START, (known[0], 1, 1, 1, 1, "pending", "m", None, None, "me", None, 1, True)),
        (inbox.NOTE, (known[0], 1, 1, 1, 1, "m", None, None, "{}", None, "[]", None, "me", "bug", "x", None, None, 1)),
        (inbox.RENEW, (known[0], "me", timedelta(seconds=1))),
        (inbox.REAP, ([0, 1, 2],)),
        (parked_keys.LOAD, ([0, 1, 2],)),
        (parked_keys.FORGET_REPEATS, ([0, 1, 2],)),
        (parked_keys.REPEAT, ([0, 1], [b"a", b"b"], [1, 2], known[:2])),
        (parked_keys.UNFINISHED, ([0, 1, 2], [b"a", b"b", b"c"], 10)),
        (inbox.KEEP_RESULTS, (known, known, ["1"] * BATCH)),
    ):
        assert not {scan for scan in await scans(big, sql, *args) if scan == ("Seq Scan", "inbox")}, sql


async def test_statements_still_use_the_index_when_their_plan_is_made_for_any_arguments(
    big: asyncpg.Connection[asyncpg.Record],
) -> None:
    """Postgres drops the plan for these arguments in favour of one for all after five runs, if it looks no dearer."""
    await big.execute("SET plan_cache_mode = force_generic_plan")
    key_of = identity.inbox_key("c1")
    known = [key_of(f"m{n}").hex() for n in range(1, 2 * BATCH, 2)]
    for sql, args in (
        (claims.LOOK_UP, (known, None)),
        (claims.SEEN_AGAIN, (known,)),
        (recall.KNOWN, (known,)),
        (repeats.DONE, (known, list(range(BATCH)))),
        (claims.TAKE_OVER, (known, [None] * BATCH, "me")),
        (inbox.REAP, ([0, 1, 2],)),
        (parked_keys.LOAD, ([0, 1, 2],)),
        (parked_keys.FORGET_REPEATS, ([0, 1, 2],)),
        (parked_keys.REPEAT, ([0, 1], [b"a", b"b"], [1, 2], known[:2])),
        (parked_keys.UNFINISHED, ([0, 1, 2], [b"a", b"b", b"c"], 10)),
        (inbox.KEEP_RESULTS, (known, known, ["1"] * BATCH)),
    ):
        assert not {scan for scan in await scans(big, sql, *args) if scan == ("Seq Scan", "inbox")}, sql


async def test_looking_for_what_is_not_done_uses_the_small_index(big: asyncpg.Connection[asyncpg.Record]) -> None:
    found = await scans(
        big, "SELECT * FROM inbox WHERE partition_id = $1 AND status = 'failed' ORDER BY received_at", 0
    )
    assert found
    assert ("Seq Scan", "inbox") not in found


async def test_python_and_postgres_make_the_same_key_of_a_message(
    database: str,
) -> None:
    connection = await asyncpg.connect(database)
    try:
        for consumer, id_ in (
            ("inventory", "placed-4711"),
            ("inventory", ""),
            ("", ":"),
            ("a:b", "c"),
            ("ünïcode", "\U0001f600~orders:0:17"),
            ("c", "back\\slash \\x00 'quote'"),
            ("c", "x" * 512),
        ):
            found = await connection.fetchval("SELECT inbox_key($1, $2)", consumer, id_)
            assert found.bytes == identity.inbox_key(consumer)(id_), (consumer, id_)
    finally:
        await connection.close()


@pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])
async def test_step_of_retention_reads_its_own_pages_and_no_index(
    big: asyncpg.Connection[asyncpg.Record], plans: str
) -> None:
    await big.execute(f"SET plan_cache_mode = {plans}")
    partitions = list(range(300))
    expired = pruning.Expired(dict.fromkeys(partitions, ROWS), await big.fetchval("SELECT now()"))
    for sql in (pruning.COUNT, pruning.DELETE, pruning.TAKE_OUT):
        assert await scans(big, sql, *expired.arguments(3, 5)) == {("Tid Range Scan", "inbox")}, sql
    assert await pruning.count(big, expired, 3, 5) == 0
    left = await big.fetch(
        "SELECT DISTINCT (ctid::text::point)[0]::integer AS page FROM inbox WHERE status = 'completed'"
    )
    assert {3, 4}.isdisjoint(row["page"] for row in left)
    assert {2, 5} <= {row["page"] for row in left}


async def test_ledger_statements_use_the_primary_key(big: asyncpg.Connection[asyncpg.Record]) -> None:
    one = ["topic1"], [1]
    for sql, args in (
        (ledger.RAISE_EPOCH, ("c1", *one, [0], "me", [False], 0)),
        (ledger.SLOTS, ("c1",)),
        (ledger.MET, ("c1", ["topic1"])),
        (ledger.FORGET_SLOT, ("c1", 0)),
        (ledger.BEGIN_WORK, ("c1", *one, [1], 1)),
        (ledger.MARK_IN_PROGRESS, ("c1", "topic1", 1, 1, 5, 6)),
        (ledger.ADVANCE, ([1], [1], [5], "c1", *one, [1], [0], [5], [b"x"], [False], [0])),
        (ledger.UNSENT, ([1],)),
        (ledger.MARK_SENT, ([1], [1], [5])),
    ):
        assert not {scan for scan in await scans(big, sql, *args) if scan[0] == "Seq Scan"}, sql
