"""Two workers whose handlers lock the same few rows, each in the order of its own messages."""

from __future__ import annotations

from tests.conftest import Deploy, Start
from tests.support import sql
from tests.support.waiting import eventually

BACKLOG = 4_000
BATCH = 20  # all five stock rows are locked many times over in each


def deadlocks(database: str) -> int:
    found: int = sql.fetch(database, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0][0]
    return found


def test_deadlock_between_workers_costs_a_retry_and_is_not_repeated(deployment: Deploy, start: Start) -> None:
    deployed = deployment(handler="reserve", partitions=2, settings={"batch": {"max_messages": BATCH}})
    deployed.feed().send(BACKLOG)
    service = start(deployed, "--workers", "2")
    report = deployed.verifier().assert_exactly_once()
    assert report.rows > BACKLOG // 2
    assert not service.events("message_failed")
    # Postgres tells its statistics with a little delay.
    eventually(lambda: deadlocks(deployed.database) > 0, 10, "a deadlock, without which this would show nothing")
    # After each one this many batches and more ran undisturbed.
    assert deadlocks(deployed.database) <= BACKLOG / BATCH / 16
