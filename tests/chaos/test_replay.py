"""Replays beside everything that may go wrong: a database that was restored, SIGKILL at every step."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka import Message

from processor import failpoints
from tests.conftest import Databases, Deploy, Start, unique
from tests.support import sql
from tests.support.deployments import Deployment
from tests.support.reading import header, read_all
from tests.support.replaying import copy_of, domain, processor, replay

RECORDS = 400


@pytest.fixture
def restored(databases: Databases, database: str) -> Iterator[str]:
    """The name of a database that the test makes."""
    name = unique("restored").replace("-", "_")
    yield name
    sql.execute(sql.with_database(database, "postgres"), f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def run_to_the_end(deployed: Deployment, start: Start, **environ: str) -> None:
    service = start(deployed, **environ)
    deployed.verifier().wait_until_done()
    service.terminate()
    assert service.wait() == 0, service.tail()


def test_what_a_restored_database_lacks_is_done_again_and_no_output_is_sent_twice(
    deployment: Deploy, start: Start, restored: str
) -> None:
    """The dump is of a moment between the two commits: it has outputs that were sent right after it."""
    deployed = deployment()
    feed = deployed.feed()
    feed.send(RECORDS)
    doomed = start(deployed, failpoints="after_postgres_commit=kill@3")
    assert doomed.wait() == -signal.SIGKILL, doomed.tail()
    dump = copy_of(deployed.database, restored)
    run_to_the_end(deployed, start)
    undisturbed = domain(deployed.database)
    assert domain(dump) != undisturbed

    found = replay(deployed, "start", "--all", "--execute", PROCESSOR_DATABASE__URL=dump)

    assert found["state"] == "finished"
    assert found["processed"] > 0
    assert (found["failed"], found["outputs"]) == (0, 0)
    assert domain(dump) == undisturbed
    deployed.verifier().assert_exactly_once()

    # The service on this database skips what the replay has done, and goes on.
    feed.send(100)
    moved = replace(deployed, database=dump)
    service = start(moved, PROCESSOR_DATABASE__URL=dump, PROCESSOR_KAFKA__ON_DATABASE_BEHIND="reapply")
    moved.verifier().assert_exactly_once()
    service.terminate()
    assert service.wait() == 0, service.tail()


# Where a replay dies, in this order, each time at the next one; the last process is left alone.
POINTS = failpoints.POINTS[failpoints.POINTS.index("before_claim") : failpoints.POINTS.index("after_kafka_commit") + 1]
KILLS = [(point, 2) for point in POINTS]


@pytest.mark.parametrize("mode", ["missing", "re-emit", "re-apply"])
def test_a_replay_killed_at_every_step_ends_as_one_that_was_left_alone(
    mode: str, deployment: Deploy, start: Start
) -> None:
    """Missing is all of it, since the service began behind the last record; for the others all is done before."""
    settings = {"failure": {"quarantine_after": 100}, "kafka": {"start": "latest" if mode == "missing" else "earliest"}}
    deployed = deployment(protocol="consumer" if mode == "re-emit" else "classic", settings=settings)
    deployed.feed().send(1200)
    service = start(deployed)
    service.wait_for_partitions(deployed.partitions)
    if mode != "missing":
        deployed.verifier().wait_until_done()
    service.terminate()
    assert service.wait() == 0, service.tail()
    before = domain(deployed.database)
    orders = deployed.verifier().judge(everything=True).orders
    scope = ("--scope", "again") if mode == "re-apply" else ()

    command = ["start", str(deployed.config), "--all", "--mode", mode, "--name", "again", *scope, "--execute"]
    for point, number in KILLS if mode == "missing" else KILLS[::3]:
        doomed = processor(deployed, "replay", *command, PROCESSOR_FAILPOINTS=f"{point}=kill@{number}")
        assert doomed.returncode == -signal.SIGKILL, (point, doomed.stdout, doomed.stderr)
        command = ["resume", str(deployed.config), "again"]
    found = replay(deployed, "resume", "again")

    after = domain(deployed.database)
    sent = Counter((header(one, "message-id"), header(one, "replay")) for one in outputs(deployed))
    assert (found["state"], found["processed"], found["failed"], found["outputs"]) == ("finished", orders, 0, orders)
    assert set(sent.values()) == {1}
    assert sum(name == "again" for _, name in sent) == orders
    assert len({id_ for id_, _ in sent}) == orders
    if mode == "missing":
        deployed.verifier().assert_exactly_once()
    elif mode == "re-emit":
        assert after == before
        assert len(sent) == 2 * orders
    else:
        assert after["reservations"] == sorted(2 * before["reservations"])
        assert len(sent) == 2 * orders


def outputs(deployed: Deployment) -> list[Message]:
    return read_all(deployed.bootstrap_servers, deployed.output_topic)
