"""What all messages need is gone for a while: everything waits, nothing is blamed, and nobody restarts anything."""

from __future__ import annotations

from pathlib import Path

from tests.chaos.conftest import Fragile
from tests.conftest import Deploy, Start
from tests.support import faulty_table, letters, sending, sql
from tests.support.reading import read_all
from tests.support.sending import Sent
from tests.support.waiting import eventually, throughout

DOWN_SECONDS = 30.0
BROKER_DOWN_SECONDS = 12.0


def test_postgres_away_for_half_a_minute_under_load_costs_nothing_but_time(
    tmp_path: Path, fragile: Fragile, deployment: Deploy, start: Start
) -> None:
    ready = tmp_path / "ready"
    deployed = deployment(
        stack=fragile.addresses,
        database=fragile.databases.migrated(),
        dead_letters=True,
        settings={"run": {"ready_file": str(ready)}},
    )
    verifier = deployed.verifier()
    postgres = fragile.stack.postgres
    feed = deployed.feed()
    process = start(deployed)
    with feed.flowing(rate=200):
        process.wait_for("ready")
        eventually(ready.exists, 10, "the ready file")
        verifier.wait_until_committed(200)

        postgres.kill()
        process.wait_for("not_ready")
        eventually(lambda: not ready.exists(), 5, "the ready file gone")
        throughout(lambda: process.running and not ready.exists(), DOWN_SECONDS, lambda: f"waiting{process.tail()}")
        postgres.start()

        process.wait_for("ready", count=2)
        eventually(ready.exists, 10, "the ready file back")
        verifier.wait_until_committed(200)
    report = verifier.assert_exactly_once(90)
    assert report.orders > DOWN_SECONDS * 100, "it was to happen under load"
    assert sql.value(deployed.database, "SELECT count(*) FROM inbox WHERE status <> 'completed' OR attempts <> 1") == 0
    assert letters.read(deployed.bootstrap_servers, deployed.dead_letter_topic) == []
    assert len(process.events("started")) == 1, "the same process from beginning to end"
    process.terminate()
    assert process.wait() == 0, process.tail()
    assert not ready.exists()


def test_broker_away_for_a_while_makes_it_not_ready_and_costs_nothing_but_time(
    tmp_path: Path, fragile: Fragile, deployment: Deploy, start: Start
) -> None:
    ready = tmp_path / "ready"
    deployed = deployment(
        stack=fragile.addresses,
        database=fragile.databases.migrated(),
        dead_letters=True,
        # Longer than the broker is away: that it ends transactions by itself then is no part of this.
        settings={"run": {"ready_file": str(ready)}, "kafka": {"transaction_timeout_ms": 60_000}},
    )
    verifier = deployed.verifier()
    broker = fragile.stack.brokers[0]
    process = start(deployed)
    with deployed.feed().flowing(rate=200):
        process.wait_for("ready")
        verifier.wait_until_committed(200)
        broker.kill()
        process.wait_for("not_ready", 60)
        process.wait_for("brokers_unreachable")
        throughout(
            lambda: process.running and not ready.exists(), BROKER_DOWN_SECONDS, lambda: f"waiting{process.tail()}"
        )
        eventually(lambda: not ready.exists(), 5, "the ready file gone")
        broker.start()
        process.wait_for("ready", 60, count=2)
        process.wait_for("brokers_reachable")
    assert len(process.events("brokers_unreachable")) == 1, "one line for all clients"
    assert len(process.events("brokers_reachable")) == 1
    assert [event for event in process.all_events() if event.get("logger") == "librdkafka"] == []
    assert [event for event in process.all_events() if event.get("level") in ("error", "critical")] == []
    verifier.assert_exactly_once(90)
    assert sql.value(deployed.database, "SELECT count(*) FROM inbox WHERE status <> 'completed' OR attempts <> 1") == 0
    assert letters.read(deployed.bootstrap_servers, deployed.dead_letter_topic) == []
    process.terminate()
    assert process.wait() == 0, process.tail()


def test_handler_without_what_it_needs_holds_its_partition_and_no_other(
    tmp_path: Path, deployment: Deploy, start: Start
) -> None:
    """Partition 0 calls a service that is down; partition 1 does without it."""
    down = tmp_path / "down"
    down.touch()
    deployed = deployment(partitions=2, dead_letters=True, settings={"handlers": {"T": "tests.support.faulty:apply"}})
    sql.execute(deployed.database, faulty_table.CREATE)
    verifier = deployed.verifier()
    calling = [Sent({"what": f"c{n}", "do": "call"}, b"c", id=f"c{n}", partition=0) for n in range(100)]
    plain = [Sent({"what": f"p{n}"}, b"p", id=f"p{n}", partition=1) for n in range(500)]
    sending.send(deployed.bootstrap_servers, deployed.input_topic, calling + plain[:300])
    process = start(deployed, TEST_DOWN_FILE=str(down))
    process.wait_for("partition_held", partition=f"{deployed.input_topic}[0]")
    eventually(lambda: verifier.committed().get(1) == 300, 30, "partition 1 done")
    sending.send(deployed.bootstrap_servers, deployed.input_topic, plain[300:])
    eventually(lambda: verifier.committed().get(1) == 500, 30, "partition 1 done once more")
    process.wait_for("partition_held", partition=f"{deployed.input_topic}[0]", count=3)
    assert verifier.committed().get(0, 0) == 0
    assert sql.value(deployed.database, "SELECT count(*) FROM effects WHERE what LIKE 'c%'") == 0

    down.unlink()
    verifier.wait_until_done()
    rows = [row["what"] for row in sql.fetch(deployed.database, "SELECT what FROM effects ORDER BY id")]
    assert [what for what in rows if what[0] == "c"] == [f"c{n}" for n in range(100)]
    assert [what for what in rows if what[0] == "p"] == [f"p{n}" for n in range(500)]
    assert len(read_all(deployed.bootstrap_servers, deployed.output_topic)) == 600
    assert letters.read(deployed.bootstrap_servers, deployed.dead_letter_topic) == []
    unusual = sql.fetch(deployed.database, "SELECT * FROM inbox WHERE status <> 'completed' OR attempts <> 1")
    assert unusual == []
    assert not process.events("message_failed"), process.tail()
    assert not process.events("partitions_lost"), process.tail()
