"""Two workers whose handlers lock the same few rows, each in the order of its own messages."""

from __future__ import annotations

from confluent_kafka.admin import AdminClient

from tests.conftest import Deploy, Start
from tests.support import sql
from tests.support.deployments import Deployment
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


def wait_until_shared_by_two(deployed: Deployment) -> None:
    admin = AdminClient({"bootstrap.servers": deployed.bootstrap_servers, "log_level": 0})

    def shared() -> bool:
        group = admin.describe_consumer_groups([deployed.consumer])[deployed.consumer].result()
        return [len(member.assignment.topic_partitions) for member in group.members] == [1, 1]

    eventually(shared, 30, "two workers with a partition each")


def test_deadlock_between_workers_costs_a_retry_and_is_not_repeated(deployment: Deploy, start: Start) -> None:
    deployed = deployment(handler="reserve", partitions=2, settings={"batch": {"max_messages": BATCH}})
    sql.execute(deployed.database, MEET)
    service = start(deployed, "--workers", "2")
    service.wait_for("partition_ready")
    wait_until_shared_by_two(deployed)
    # The first order of each partition is for another row, and none is in both: that would be waited for as well.
    deployed.feed(duplicates=0).send(BACKLOG)
    report = deployed.verifier().assert_exactly_once()
    assert report.rows == BACKLOG
    assert not service.events("message_failed")
    # Postgres tells its statistics with a little delay.
    eventually(lambda: deadlocks(deployed.database) > 0, 10, "a deadlock, without which this would show nothing")
    # After each one this many batches and more ran undisturbed.
    assert deadlocks(deployed.database) <= BACKLOG / BATCH / 16
