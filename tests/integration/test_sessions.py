"""What is set for the processor's sessions on Postgres."""

from __future__ import annotations

import uuid
from urllib.parse import urlsplit, urlunsplit

import pytest

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
