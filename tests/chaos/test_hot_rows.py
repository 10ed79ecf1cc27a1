"""Two workers whose handlers lock the same few rows, each in the order of its own messages."""

from __future__ import annotations

from tests.conftest import Deploy, Start
from tests.support import sql
from tests.support.waiting import eventually

BACKLOG = 4_000
BATCH = 20  # all five stock rows are locked many times over in each

# The first two transactions, each with its first row in hand, wait for each other, and from there run into a
# deadlock. Left to themselves, workers may as well fall into step and lock all five rows in turns.
MEET = """
    CREATE SEQUENCE arrivals;
    CREATE FUNCTION meet() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF nextval('arrivals') <= 2 THEN
            WHILE (SELECT last_value FROM arrivals) < 2 LOOP
                PERFORM pg_sleep(0.005);
            END LOOP;
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER meet AFTER UPDATE ON stock FOR EACH ROW EXECUTE FUNCTION meet();
"""


def deadlocks(database: str) -> int:
    found: int = sql.fetch(database, "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()")[0][0]
    return found


def test_deadlock_between_workers_costs_a_retry_and_is_not_repeated(deployment: Deploy, start: Start) -> None:
    deployed = deployment(handler="reserve", partitions=2, settings={"batch": {"max_messages": BATCH}})
    sql.execute(deployed.database, MEET)
    service = start(deployed, "--workers", "2")
    service.wait_for("partition_ready")
    deployed.wait_until_shared(1, 1)
    # The first order of each partition is for another row, and none is in both: that would be waited for as well.
    deployed.feed(duplicates=0).send(BACKLOG)
    report = deployed.verifier().assert_exactly_once()
    assert report.rows == BACKLOG
    assert not service.events("message_failed")
    # Postgres tells its statistics with a little delay.
    eventually(lambda: deadlocks(deployed.database) > 0, 10, "a deadlock, without which this would show nothing")
    # After each one this many batches and more ran undisturbed.
    assert deadlocks(deployed.database) <= BACKLOG / BATCH / 16
