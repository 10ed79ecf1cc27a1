"""The runbooks of docs/operations.md, each followed step by step: its commands are taken from the page."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path

import pytest
from confluent_kafka import Message

from processor.stack import Stack
from tests.conftest import Deploy, Start, put_stock, unique
from tests.support import faulty_table, runbooks, sending, servers, sql
from tests.support.deployments import MIGRATIONS, Deployment
from tests.support.processes import Process
from tests.support.reading import header, read_all
from tests.support.replaying import copy_of
from tests.support.runbooks import Runbook
from tests.support.sending import Sent

Follow = Callable[[Deployment], AbstractContextManager[Runbook]]


@pytest.fixture
def follow(request: pytest.FixtureRequest, local_stack: Stack, tmp_path: Path, start: Start) -> Follow:
    """Opens the page at the runbook that has the name of the test."""
    headings = {runbooks.test_name(heading): heading for heading in runbooks.sections()}
    heading = headings[request.function.__name__]
    return lambda deployed: runbooks.followed(heading, deployed, local_stack, tmp_path, start)


def stop(*services: Process) -> None:
    for service in services:
        service.terminate()
    for service in services:
        assert service.wait() == 0, service.tail()


def order(number: int, partition: int = 0, sku: str = "sku-1") -> Sent:
    event_id, value = f"o-{number}", {"order_id": f"ordered-{number}", "sku": sku, "quantity": 1}
    value["event_id"] = event_id
    return Sent(value, str(value["order_id"]).encode(), "OrderPlaced", event_id, partition=partition)


def send(deployed: Deployment, *records: Sent) -> None:
    sending.send(deployed.bootstrap_servers, deployed.input_topic, records)


def outputs(deployed: Deployment) -> list[Message]:
    return read_all(deployed.bootstrap_servers, deployed.output_topic)


def test_deploy_one_topic(deployment: Deploy, follow: Follow, empty_database: str) -> None:
    """Everything is there but for what the runbook makes: topics and tables."""
    there = deployment(dead_letters=True)
    orders, invoices = unique("orders"), unique("invoices")
    text = there.config.read_text().replace(there.input_topic, orders)
    there.config.write_text(text.replace(there.database, empty_database))
    deployed = replace(
        there,
        input_topic=orders,
        output_topic=invoices,
        database=empty_database,
        partitions=6,
        environment={"TEST_OUTPUT_TOPIC": invoices},
    )
    with follow(deployed) as book:
        book.run()
        assert "0001_inventory" in book.run()
        put_stock(empty_database)
        book.deployed.feed().send(200)
        service = book.service()
        book.run()
    deployed.verifier().assert_exactly_once()
    stop(service)


def test_scale_out(deployment: Deploy, follow: Follow, start: Start) -> None:
    with follow(deployment(handler="reserve_many")) as book:
        deployed = book.deployed
        first = start(deployed)
        first.wait_for_partitions(deployed.partitions)
        with deployed.feed().flowing(rate=200):
            assert "running" in book.run()
            more = book.service()
            deployed.wait_until_shared(2, 1, 1)
            book.run()
            stop(more)
            deployed.wait_until_shared(4)
    deployed.verifier().assert_exactly_once()
    stop(first)


def test_upgrade_without_loss(deployment: Deploy, follow: Follow, start: Start, tmp_path: Path) -> None:
    """The new version has another handler and one table more; in the end somebody goes back."""
    deployed = deployment()
    old = replace(deployed, config=tmp_path / "old.toml")
    text = deployed.config.read_text()
    old.config.write_text(text)
    (tmp_path / "tables").mkdir()
    (tmp_path / "tables" / "0001_notes.sql").write_text("CREATE TABLE notes (text text);\n")
    both = json.dumps([str(MIGRATIONS), "tables"])
    deployed.config.write_text(text.replace(json.dumps([str(MIGRATIONS)]), both).replace(":reserve", ":reserve_many"))
    first, second = start(old), start(old)
    old.wait_until_shared(2, 2)
    with follow(deployed) as book, deployed.feed().flowing(rate=200):
        assert "0001_notes" in book.run()
        stop(first)
        new = book.service()
        assert "no message matches" in book.run()
        old.wait_until_shared(2, 2)
        deployed.verifier().wait_until_committed(50)
        stop(second)
        back = start(old)
        old.wait_until_shared(2, 2)
        deployed.verifier().wait_until_committed(50)
    deployed.verifier().assert_exactly_once()
    stop(new, back)


def test_rewind(deployment: Deploy, follow: Follow, start: Start, tmp_path: Path) -> None:
    """What had failed is tried again; everything else is skipped."""
    with follow(deployment(dead_letters=True)) as book:
        deployed = book.deployed
        verifier = deployed.verifier()
        sql.execute(deployed.database, "DELETE FROM stock WHERE sku = 'sku-4'")
        deployed.feed().send(300)
        service = start(deployed)
        verifier.wait_until_done()
        stop(service)
        before, failed = verifier.committed(), verifier.judge(everything=True).lost_rows
        assert len(failed) > 10
        put_stock(deployed.database)

        assert f"{deployed.input_topic}" in book.run()
        assert verifier.committed() == before
        move = book.left[0]
        assert "4 partition(s) moved" in book.run()
        assert set(verifier.committed().values()) == {0}
        book.run()
        assert verifier.committed() == before
        (tmp_path / "back.json").unlink()
        book.again(move)
        service = book.service()
        book.run()
        assert len(service.events("partition_ready", found="rewound", start=0)) == deployed.partitions
    verifier.assert_exactly_once()
    stop(service)


def test_replay_after_a_bug_fix(deployment: Deploy, follow: Follow, start: Start) -> None:
    deployed = deployment(partitions=1, settings={"handlers": {"T": "tests.support.faulty:apply"}})
    sql.execute(deployed.database, faulty_table.CREATE)
    service = start(deployed)
    send(deployed, *(Sent({"what": what}, id=id_) for id_, what in (("o-16", "right"), ("o-17", "changed"))))
    deployed.verifier().wait_until_done()
    stop(service)
    deployed.config.write_text(deployed.config.read_text().replace("faulty:apply", "faulty:apply_anew"))
    fixed = start(deployed)
    fixed.wait_for_partitions(1)
    with follow(deployed) as book:
        shown = book.run()
        assert "outputs: 1 the same, 1 changed" in shown
        assert "o-17" in shown
        assert "o-16" not in shown
        shown = book.run()
        assert "ticket-4711: finished: 1 processed, 1 skipped, 0 failed, 1 output" in shown
        assert "wrong totals" in shown
        assert "ticket-4711" in book.run()
    sent = [(json.loads(one.value() or b"")["what"], header(one, "replay")) for one in outputs(deployed)]
    assert sent == [("right", None), ("changed", None), ("changed indeed", "ticket-4711")]
    assert sql.value(deployed.database, "SELECT count(*) FROM effects") == 2
    stop(fixed)


def test_redrive(deployment: Deploy, follow: Follow, start: Start) -> None:
    with follow(deployment(dead_letters=True)) as book:
        deployed = book.deployed
        sql.execute(deployed.database, "DELETE FROM stock WHERE sku = 'sku-4'")
        send(deployed, *(order(number, sku="sku-4") for number in (16, 17)), order(18, sku="never"))
        service = start(deployed)
        deployed.verifier().wait_until_done()
        assert "no such sku" in book.run()
        put_stock(deployed.database)
        shown = book.run(code=1)
        assert "1 sent: 1 completed" in shown
        assert "2 sent: 1 completed, 1 failed again" in shown
        book.run()
    report = deployed.verifier().judge(everything=True)
    assert report.faults.keys() == {"lost_rows", "lost_outputs"}
    assert [len(found) for found in report.faults.values()] == [1, 1], str(report)
    stop(service)


def test_database_restored_from_a_backup(deployment: Deploy, follow: Follow, start: Start) -> None:
    with follow(deployment(dead_letters=True)) as book:
        deployed = book.deployed
        verifier, feed = deployed.verifier(), deployed.feed()
        feed.send(200)
        doomed = start(deployed, failpoints="after_postgres_commit=kill@3")
        assert doomed.wait() == -signal.SIGKILL, doomed.tail()
        backup = unique("backup").replace("-", "_")
        copy_of(deployed.database, backup)
        feed.send(200)
        service = start(deployed)
        verifier.assert_exactly_once()
        stop(service)
        restore(deployed.database, backup)

        halted = start(deployed)
        assert halted.wait() == 3, halted.tail()
        assert "the database has lost commits" in halted.tail()
        assert "it has lost the commits of" in book.run()
        book.run()
        report = verifier.judge(everything=True)
        assert not report.faults, str(report)
        service = book.service()
        assert "clean" in book.run()
        assert service.events("partition_ready", found="reapplying"), service.tail()
        stop(service)
        service = book.service()
        service.wait_for("partition_ready", found="in_step", count=deployed.partitions)
    verifier.assert_exactly_once()
    stop(service)


def restore(database: str, backup: str) -> None:
    server, name = sql.with_database(database, "postgres"), database.rpartition("/")[2]
    sql.execute(server, f"DROP DATABASE {name} WITH (FORCE)")
    sql.execute(server, f"ALTER DATABASE {backup} RENAME TO {name}")


def test_topic_re_created(deployment: Deploy, follow: Follow, start: Start) -> None:
    with follow(deployment(partitions=1, dead_letters=True)) as book:
        deployed = book.deployed
        send(deployed, *map(order, range(3)), order(3, sku="never"))
        service = start(deployed)
        deployed.verifier().wait_until_done()
        stop(service)
        tool = 'kafka-topics --bootstrap-server "$BROKERS"'
        book.again(f"{tool} --delete --topic {deployed.input_topic}")
        book.again(f"{tool} --create --topic {deployed.input_topic} --partitions 1")
        send(deployed, *map(order, range(2, 6)))

        halted = start(deployed)
        assert halted.wait() == 3, halted.tail()
        assert "created anew" in halted.tail()
        assert "1 failed" in book.run()
        assert "1 partition(s) begin anew" in book.run()
        service = book.service()
        assert "o-3" in book.run()
    assert reserved(deployed) == {f"ordered-{number}": 1 for number in (0, 1, 2, 4, 5)}
    stop(service)


def reserved(deployed: Deployment) -> dict[str, int]:
    rows = sql.fetch(deployed.database, "SELECT order_id, count(*) AS number FROM reservations GROUP BY 1 ORDER BY 1")
    return {row["order_id"]: row["number"] for row in rows}


def test_partitions_added(deployment: Deploy, follow: Follow, start: Start) -> None:
    """Records of the new partitions are there before the service knows of these, and `start` would leave them out."""
    with follow(deployment(settings={"kafka": {"start": "latest"}})) as book:
        deployed = book.deployed
        service = start(deployed)
        service.wait_for_partitions(deployed.partitions)
        deployed.feed().send(200)
        book.run()
        book.run()
        send(deployed, *(order(number, number % 6) for number in range(60)))
        second = book.service()
        book.run()
        added = [event for one in (service, second) for event in one.events("partition_ready", found="partition_added")]
        assert sorted(event["partition"] for event in added) == [
            f"{deployed.input_topic}[{number}]" for number in (4, 5)
        ]
    deployed.verifier().assert_exactly_once()
    stop(service, second)


def test_moving_to_another_cluster(deployment: Deploy, follow: Follow, start: Start, tmp_path: Path) -> None:
    with (
        servers.embedded(tmp_path / "other") as other,
        follow(deployment(dead_letters=True)) as book,
    ):
        deployed = book.deployed
        moved = replace(deployed, bootstrap_servers=other.bootstrap_servers)
        service = start(deployed)
        deployed.feed().send(200)
        book.run()
        stop(service)
        before = deployed.verifier().assert_exactly_once()
        config = deployed.config.read_text()
        deployed.config.write_text(config.replace(deployed.bootstrap_servers, moved.bootstrap_servers))
        book.environ["BROKERS"] = moved.bootstrap_servers
        assert "4 partition(s) begin anew" in book.run()
        copied = moved.feed()  # it begins with the same records
        copied.send(200)
        copied.send(100)
        service = book.service()
        book.run()
        after = moved.verifier().judge(everything=True)
        assert after.faults.keys() == {"lost_outputs"}
        assert len(after.lost_outputs) == before.outputs, "they are in the old cluster"
        assert after.outputs == after.orders - before.orders
        stop(service)
