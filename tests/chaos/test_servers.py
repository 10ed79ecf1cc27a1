"""Answers lost on the way, servers killed under load: the stored facts decide, and no processor is restarted."""

from __future__ import annotations

import pytest

from tests.chaos.conftest import Fragile
from tests.conftest import Deploy, Start
from tests.support import sql
from tests.support.proxy import Proxy, asks_for_offsets, is_end_of_transaction, is_postgres_commit, postgres_frame

CUT_SECONDS = 30.0


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        pytest.param(True, "died_between_commits", id="committed-but-answer-lost"),
        pytest.param(False, "in_step", id="never-reached-the-server"),
    ],
)
def test_a_connection_cut_during_commit_is_settled_by_the_ledger(
    forward: bool, found: str, database: str, deployment: Deploy, start: Start
) -> None:
    port = sql.port_of(database)
    with Proxy(postgres_frame, port) as proxy:
        deployed = deployment(settings={"database": {"url": sql.with_port(database, proxy.port)}})
        deployed.feed().send(1000)
        proxy.cut_at(is_postgres_commit, forward=forward, number=3)
        process = start(deployed)
        assert proxy.sprung.wait(CUT_SECONDS), process.tail()
        process.wait_for("starting_over", kind="ConnectionLost")
        process.wait_for("partition_ready", count=deployed.partitions + 1)
        again = {ready["found"] for ready in process.events("partition_ready")[deployed.partitions :]}
        assert again in ({found}, {found, "in_step"}), "of the partitions that were in the batch\n" + process.tail()
        deployed.verifier().assert_exactly_once()
        process.terminate()
        assert process.wait() == 0, process.tail()


@pytest.mark.parametrize("forward", [True, False], ids=["committed-but-answer-lost", "never-reached-the-broker"])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_lost_answer_to_the_kafka_commit_neither_loses_nor_doubles(
    protocol: str, forward: bool, fragile: Fragile, deployment: Deploy, start: Start
) -> None:
    deployed = deployment(protocol=protocol, stack=fragile.addresses, database=fragile.databases.migrated())
    deployed.feed().send(1000)
    fragile.broker.cut_at(is_end_of_transaction, forward=forward, number=4)
    process = start(deployed)
    assert fragile.broker.sprung.wait(CUT_SECONDS), process.tail()
    deployed.verifier().assert_exactly_once()
    process.terminate()
    assert process.wait() == 0, process.tail()


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_postgres_and_the_broker_are_killed_under_load_and_the_processor_goes_on(
    protocol: str, fragile: Fragile, deployment: Deploy, start: Start
) -> None:
    deployed = deployment(protocol=protocol, stack=fragile.addresses, database=fragile.databases.migrated())
    verifier = deployed.verifier()
    postgres, broker = fragile.stack.postgres, fragile.stack.brokers[0]
    feed = deployed.feed()
    with feed.flowing(rate=300):
        process = start(deployed)
        process.wait_for_partitions(deployed.partitions)
        verifier.wait_until_committed(100)
        postgres.kill()
        process.wait_for("starting_over", kind="ConnectionLost")
        postgres.start()
        verifier.wait_until_committed(100)
        broker.kill()
        broker.start()
        verifier.wait_until_committed(100)
    verifier.assert_exactly_once()
    process.terminate()
    assert process.wait() == 0, process.tail()


def test_an_answer_that_comes_late_does_not_move_the_position(
    fragile: Fragile, deployment: Deploy, start: Start
) -> None:
    """librdkafka asks where a log ends if told to start there, and goes there whenever the answer comes."""
    deployed = deployment(stack=fragile.addresses, database=fragile.databases.migrated())
    verifier = deployed.verifier()
    feed = deployed.feed()
    feed.send(400)
    fragile.broker.hold(lambda request: asks_for_offsets(request, deployed.consumer))
    start(deployed)
    verifier.assert_exactly_once()
    with feed.flowing(rate=300):
        fragile.broker.release()
        verifier.wait_until_committed(600)
    verifier.assert_exactly_once(20)
