"""What is set for the processor's sessions on Postgres."""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest

from processor.postgres import connections
from processor.postgres.deadlocks import DeadlockGate
from processor.postgres.session import Session
from processor.settings.load import load
from tests.integration.conftest import MakeBench
from tests.support.bench import Sent

QUESTION = [Sent({"what": "SHOW deadlock_timeout"})]


async def test_deadlocks_between_workers_are_noticed_sooner_than_by_default(bench: MakeBench) -> None:
    b = bench("ask")
    b.send(QUESTION)
    await b.run_until_done()
    assert await b.effects() == ["50ms"]


@pytest.mark.parametrize("where", ["deployment", "database"])
async def test_how_soon_deadlocks_are_noticed_stays_what_somebody_has_chosen(bench: MakeBench, where: str) -> None:
    b = bench("ask", database={"settings": {"deadlock_timeout": "3s"}} if where == "deployment" else {})
    if where == "database":
        await b.execute(f"ALTER DATABASE {urlsplit(b.database).path[1:]} SET deadlock_timeout = '3s'")
    b.send(QUESTION)
    await b.run_until_done()
    assert await b.effects() == ["3s"]


async def test_user_who_may_not_set_it_has_postgres_own_deadlock_timeout_and_works(bench: MakeBench) -> None:
    b = bench("ask")
    role = f"clerk_{uuid.uuid4().hex[:8]}"
    parts = urlsplit(b.database)
    url = urlunsplit(parts._replace(netloc=f"{role}:clerk-hunter2@{parts.netloc.rpartition('@')[2]}"))
    await b.execute(
        f"CREATE ROLE {role} LOGIN PASSWORD 'clerk-hunter2'",
        f"GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {role}",
    )
    try:
        b.send(QUESTION)
        await b.run_until_done(PROCESSOR_DATABASE__URL=url)
        assert await b.effects() == ["1s"]
    finally:
        await b.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@pytest.mark.parametrize("of", ["database", "role"])
async def test_isolation_level_that_database_or_role_has_by_default_does_not_become_ours(
    bench: MakeBench, level: str, of: str
) -> None:
    b = bench("ask", batch={"linger_ms": 200})
    url = urlsplit(b.database)
    target = f"DATABASE {url.path[1:]}" if of == "database" else f"ROLE {url.username} IN DATABASE {url.path[1:]}"
    await b.execute(f"ALTER {target} SET default_transaction_isolation = '{level}'")
    b.send([Sent({"what": "SHOW transaction_isolation"}) for _ in range(3)])
    await b.run_until_done()
    assert await b.effects() == ["read committed"] * 3
    settings = load(b.config, {})
    control = Session(settings, "control", retried=True)
    async with control.use() as connection:
        assert await connection.fetchval("SHOW transaction_isolation") == "read committed"
    await control.close()
    async with connections.with_tables(settings) as connection:
        assert await connection.fetchval("SHOW transaction_isolation") == "read committed"
    async with connections.connected(settings) as connection:
        assert await connection.fetchval("SHOW transaction_isolation") == "read committed"


async def test_batches_are_read_committed_even_where_a_handler_has_changed_the_session(bench: MakeBench) -> None:
    b = bench("ask", batch={"max_messages": 1})
    b.send([Sent({"what": "SELECT set_config('default_transaction_isolation', 'serializable', false)"})])
    b.send([Sent({"what": "SHOW transaction_isolation"}) for _ in range(3)])
    await b.run_until_done()
    assert (await b.effects())[1:] == ["read committed"] * 3


async def test_worker_that_waits_for_its_turn_for_many_command_timeouts_keeps_its_place(
    bench: MakeBench, logs: list[Any]
) -> None:
    """Another worker's batch runs alone, and takes longer than a statement may."""
    b = bench(database={"command_timeout_ms": 1_000})
    b.send([Sent({"what": "x"}, id="m")])
    digest = hashlib.sha256(f"processor-turn:{b.consumer}".encode()).digest()
    alone = await asyncpg.connect(b.database)
    await alone.execute("SELECT pg_advisory_lock($1)", int.from_bytes(digest[:8], "big", signed=True))
    long_waits = """SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'advisory'
                    AND now() - state_change > interval '4 seconds'"""
    async with b.running():
        await b.until(lambda: b.rows(long_waits), "a session waits for four times as long as a statement may take")
        await alone.close()
        await b.done()
    assert await b.effects() == ["x"]
    assert not [entry for entry in logs if entry["event"] in ("starting_over", "recovery_retried")]


async def test_turn_that_comes_while_postgres_is_asked_whether_it_is_waited_for_is_taken(bench: MakeBench) -> None:
    b = bench(database={"command_timeout_ms": 1_000})
    settings = load(b.config, {})
    asked, answer = asyncio.Event(), asyncio.Event()

    class Slow(Session):
        @asynccontextmanager
        async def use(self) -> AsyncIterator[Any]:
            asked.set()
            await answer.wait()
            async with super().use() as connection:
                yield connection

    control, work = Slow(settings, "control", retried=True), Session(settings, "work")
    digest = hashlib.sha256(f"processor-turn:{b.consumer}".encode()).digest()
    alone = await asyncpg.connect(b.database)
    await alone.execute("SELECT pg_advisory_lock($1)", int.from_bytes(digest[:8], "big", signed=True))
    async with work.use() as connection:
        gate = DeadlockGate(settings, control)
        waits = "SELECT 1 FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'"
        begun = asyncio.create_task(gate.wait_for_turn(connection, gate.begin_sql()))
        await asked.wait()
        await alone.close()
        while await b.rows(waits, connection.get_server_pid()):  # noqa: ASYNC110 - nobody tells a bystander
            await asyncio.sleep(0)
        answer.set()
        await begun
        assert connection.is_in_transaction()
    await control.close()
    await work.close()
