"""Who is to blame: a message for what it did, nobody for what the surroundings did, and never a neighbour."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit

import asyncpg
import pytest

from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent


def numbered(count: int, type_: str = "T") -> list[Sent]:
    return [Sent({"what": f"w{n}"}, id=f"m{n}", key=f"k{n}".encode(), type=type_) for n in range(count)]


async def statuses(bench: Bench) -> dict[str, str]:
    return {name: row["status"] for name, row in (await bench.inbox()).items()}


async def test_queued_write_that_fails_unseen_is_not_lost_because_a_neighbour_swallowed_its_error(
    bench: MakeBench,
) -> None:
    b = bench({"Q": "queue_odd", "S": "read_and_swallow"}, batch={"linger_ms": 200})
    handlers.failing.add("m1")
    b.send([Sent({"what": f"w{n}"}, id=f"m{n}", type="S" if n in (2, 4) else "Q") for n in range(6)])
    await b.run_until_done()
    assert sorted(await b.effects()) == ["w0", "w3", "w5"]
    found = await statuses(b)
    assert found.pop("m1") == "failed"
    assert set(found.values()) == {"completed"}


async def test_slow_handlers_that_only_queue_do_not_lose_their_transaction(bench: MakeBench) -> None:
    b = bench("wait_a_little", database={"idle_in_transaction_timeout_ms": 1_000}, batch={"linger_ms": 200})
    b.send(numbered(25))
    await b.run_until_done()
    assert sorted(await b.effects()) == sorted(f"w{n}" for n in range(25))
    assert set(handlers.calls.values()) == {1}


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_handler_that_waits_for_longer_than_postgres_does_keeps_its_transaction(
    bench: MakeBench, concurrency: int
) -> None:
    b = bench("hold_up", concurrency=concurrency, database={"idle_in_transaction_timeout_ms": 1_000})
    b.send(numbered(2))
    long_ago = "SELECT 1 FROM pg_stat_activity WHERE application_name = $1 AND xact_start < now() - interval '2.5 s'"
    async with b.running():
        await b.until(lambda: b.rows(long_ago, f"processor:{b.consumer}"), "a transaction that lives for so long")
        handlers.gate.set()
        await b.done()
    assert set((await statuses(b)).values()) == {"completed"}
    assert handlers.calls == {"m0": 1, "m1": 1}


async def test_statement_without_answer_in_time_is_tried_again(bench: MakeBench) -> None:
    b = bench("slow_statement", database={"command_timeout_ms": 500})
    b.send([Sent({"what": "x"}, id="m")])
    await b.run_until_done()
    assert (await b.effects(), await statuses(b), handlers.calls["m"]) == (["x"], {"m": "completed"}, 2)


async def test_message_whose_id_another_transaction_holds_is_waited_for_and_not_blamed(bench: MakeBench) -> None:
    b = bench(database={"command_timeout_ms": 300})
    b.send([Sent({"what": "x"}, id="m")])
    holder = await asyncpg.connect(b.database)
    transaction = holder.transaction()
    await transaction.start()
    await holder.execute(
        'INSERT INTO inbox (key, partition_id, "offset", payload_hash) VALUES ($1, 0, 0, 0)',
        b.key_of("m"),
    )
    async with b.running():
        await waiting_for_a_lock(b)
        await transaction.rollback()
        await holder.close()
        await b.done()
    assert (await b.effects(), await statuses(b)) == (["x"], {"m": "completed"})


async def waiting_for_a_lock(bench: Bench) -> None:
    """Until the engine has given up waiting at least once: its connection is another one then."""
    query = """SELECT array_agg(pid) FROM pg_stat_activity
               WHERE datname = current_database() AND wait_event_type = 'Lock' AND query LIKE '%INSERT INTO inbox%'"""
    pids: set[int] = set()

    async def two_have_waited() -> bool:
        pids.update((await bench.rows(query))[0]["array_agg"] or ())
        return len(pids) >= 2

    await bench.until(two_have_waited, "the engine waits for the lock on another connection")


async def test_database_that_is_read_only_for_a_while_fails_nobody_and_needs_no_restart(
    bench: MakeBench, logs: list[Any]
) -> None:
    """As after a failover that led to a reader: whoever was connected to it then looks for the writer."""
    b = bench()
    name = urlsplit(b.database).path[1:]
    b.send(numbered(3))
    async with b.running():
        await b.done()
        await b.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        await end_connections(b)
        b.send([Sent({"what": "later"}, id="later")])
        await b.until(lambda: any("read-only" in str(entry.get("reason")) for entry in logs), "Postgres refused us")
        await b.execute(
            "SET default_transaction_read_only = off",
            f"ALTER DATABASE {name} RESET default_transaction_read_only",
        )
        await b.done()
    assert await b.effects() == ["w0", "w1", "w2", "later"]
    assert set((await statuses(b)).values()) == {"completed"}


async def test_session_that_has_become_read_only_is_given_up_for_another_one(bench: MakeBench) -> None:
    b = bench("ask", batch={"max_messages": 1})
    b.send([Sent({"what": "SELECT set_config('default_transaction_read_only', 'on', false)"})])
    b.send([Sent({"what": "SHOW default_transaction_read_only"}) for _ in range(3)])
    await b.run_until_done()
    assert (await b.effects())[-1] == "off"
    assert len(await b.effects()) == 4
    assert set((await statuses(b)).values()) == {"completed"}


async def end_connections(bench: Bench) -> None:
    await bench.rows(
        """SELECT pg_terminate_backend(pid) FROM pg_stat_activity
           WHERE datname = current_database() AND application_name = $1""",
        f"processor:{bench.consumer}",
    )


async def test_failure_of_a_type_without_inbox_leaves_the_row_of_another_message_alone(bench: MakeBench) -> None:
    b = bench({"T": "apply", "R": {"call": "rejected", "inbox": False}})
    b.send([Sent({"what": "x"}, id="o1"), Sent({"what": "y"}, id="o1", type="R"), Sent({}, id="o1", type="R")])
    await b.run_until_done()
    assert await statuses(b) == {
        "o1": "completed",
        f"o1~{b.place(1)}": "failed",
        f"o1~{b.place(2)}": "failed",
    }


async def test_good_delivery_behind_an_undecodable_one_with_its_id_is_processed(bench: MakeBench) -> None:
    b = bench(batch={"linger_ms": 200})
    b.send([Sent({"what": "x"}, id="m", type="Nobody"), Sent({"what": "x"}, id="m"), Sent({"what": "y"}, id="n")])
    await b.run_until_done()
    assert await b.effects() == ["x", "y"]
    assert await statuses(b) == {"m": "completed", "n": "completed"}


async def test_cancellation_inside_a_handler_is_its_failure_and_not_the_end_of_the_service(bench: MakeBench) -> None:
    b = bench({"C": "cancelled", "T": "apply"})
    b.send([Sent({"what": "c"}, id="c", type="C"), Sent({"what": "x"}, id="m")])
    await b.run_until_done()
    assert await b.effects() == ["x"]
    assert await statuses(b) == {"c": "failed", "m": "completed"}
    assert "cancellation" in json.loads((await b.inbox())["c"]["error"])["message"]
