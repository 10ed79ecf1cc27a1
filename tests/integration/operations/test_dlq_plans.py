"""The statements of `processor dlq` read only what is not done, whatever the planner may guess."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import asyncpg
import orjson
import pytest

from processor.messages import identity
from processor.postgres import dead_letters, redrive
from processor.postgres.dead_letters import Filter
from tests.support.shop import NOW


@pytest.fixture
async def big(database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A hundred thousand rows, one in a thousand failed; of the failed, every fourth is parked."""
    connection = await asyncpg.connect(database)
    await connection.execute(
        """INSERT INTO inbox (key, partition_id, "offset", payload_hash, status, message_id, record_key, parked_key)
           SELECT inbox_key('c', 'm' || n), n % 4, n, n,
                  CASE WHEN n % 1000 = 0 THEN 'failed' ELSE 'completed' END::inbox_status, 'm' || n, 'k',
                  CASE WHEN n % 4000 = 0 THEN convert_to('k' || n % 3, 'UTF8') END
           FROM generate_series(1, 100000) n"""
    )
    await connection.execute(
        """INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions,
                                first_offset, next_offset, owner, slot)
           SELECT 'c', 'topic', n, 1, 'id', 1, 0, 0, 'me', 0 FROM generate_series(0, 3) n"""
    )
    await connection.execute("ANALYZE inbox, ledger")
    yield connection
    await connection.close()


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_statements_read_only_what_is_not_done(big: asyncpg.Connection[asyncpg.Record], mode: str) -> None:
    await big.execute(f"SET plan_cache_mode = {mode}")
    after = dead_letters.BEGINNING
    keys = [b"k0", b"k1"]
    some = [identity.inbox_key("c")(f"m{n}000").hex() for n in range(1, 50)]
    for wanted in (
        Filter(),
        Filter(ids=("m1000", "m2000")),
        Filter(key=b"k", reason="r", error_class="bug", since=NOW),
    ):
        arguments = wanted.arguments("c", [0])
        for statement, values in (
            (dead_letters.LIST, [*wanted.arguments("c", [0, 1, 2, 3]), 100]),
            (dead_letters.COUNT, wanted.arguments("c", [0, 1, 2, 3])),
            (dead_letters.NAMED, [*arguments, ["m1000", "m2000"], True, True]),
            (redrive.SENT_BEFORE, arguments),
            (redrive.SCOPE, [*arguments, some, False, None]),
            (redrive.COLLISIONS, [*arguments, some]),
            (redrive.COUNT_TO_SEND, [*arguments, some, False, 100_000, keys]),
            (redrive.PAGE_TO_SEND, [*arguments, some, False, 100_000, keys, *after, 1000]),
            (dead_letters.PAGE_TO_DISCARD, [*arguments, *after, 1000]),
        ):
            assert await indexes(big, statement, values) <= {"inbox_unfinished", "inbox_pkey"}, statement
    for statement, values in (
        (dead_letters.HEADS, [[0, 0], keys]),
        (redrive.PAGE_OF_KEYS, [0, keys, some, True, *after, 1000]),
    ):
        assert await indexes(big, statement, values) <= {"inbox_parked", "inbox_pkey"}, statement
    for statement, values in (
        (redrive.LOAD, [some]),
        (redrive.STATES, [some]),
        (redrive.MARK, [some, ["1"] * len(some), ["{}"] * len(some)]),
        (dead_letters.DISCARD, [some, "{}"]),
    ):
        assert await indexes(big, statement, values) <= {"inbox_pkey", "inbox_unfinished"}, statement


async def indexes(connection: asyncpg.Connection[asyncpg.Record], statement: str, values: list[Any]) -> set[str]:
    """Of the inbox that are used; "none" for a scan of the table."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        plan = orjson.loads(await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", *values))
    finally:
        await transaction.rollback()
    found: set[str] = set()

    def visit(node: dict[str, Any]) -> None:
        if node.get("Relation Name") == "inbox" and node["Node Type"] == "Seq Scan":
            found.add("none")
        if str(node.get("Index Name", "")).startswith("inbox"):
            found.add(node["Index Name"])
        for child in node.get("Plans", []):
            visit(child)

    visit(plan[0]["Plan"])
    assert found, statement
    return found
