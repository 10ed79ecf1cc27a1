"""Replays beside everything that may go wrong: a database that was restored, SIGKILL at every step."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import pytest
from confluent_kafka import Message

from processor import failpoints
from tests.conftest import Databases, Deploy, Start, unique
from tests.support import faulty_table, sending, sql
from tests.support.deployments import Deployment
from tests.support.reading import header, read_all
from tests.support.replaying import copy_of, domain, processor, replay
from tests.support.sending import Sent

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


def test_messages_that_failed_before_the_dump_and_were_redriven_after_it_and_some_without_inbox_are_sent_once(
    deployment: Deploy, start: Start, restored: str
) -> None:
    handlers = {"T": "tests.support.faulty:apply_anew", "U": {"call": "tests.support.faulty:apply", "inbox": False}}
    deployed = deployment(partitions=1, settings={"handlers": handlers})
    sql.execute(deployed.database, faulty_table.CREATE)

    def send(*names: str, type_: str = "T") -> None:
        records = [Sent({"what": name}, name.encode(), type_, name) for name in names]
        sending.send(deployed.bootstrap_servers, deployed.input_topic, records)

    def written(database: str) -> list[str]:
        return sorted(row["what"] for row in sql.fetch(database, "SELECT what FROM effects"))

    send("a", "fails now")
    send("u", type_="U")
    run_to_the_end(deployed, start)
    killed = processor(
        deployed, "replay", "start", str(deployed.config), "--all", "--name", "early", "--execute",
        PROCESSOR_FAILPOINTS="before_claim=kill@1",
    )  # fmt: skip
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    dump = copy_of(deployed.database, restored)
    deployed.config.write_text(deployed.config.read_text().replace("apply_anew", "apply"))
    service = start(deployed)
    redriven = processor(deployed, "dlq", "redrive", str(deployed.config), "--all")
    assert redriven.returncode == 0, redriven.stderr
    send("b")
    send("u2", type_="U")
    deployed.verifier().wait_until_done()
    service.terminate()
    assert service.wait() == 0, service.tail()
    everything = ["a", "b", "fails now", "u", "u2"]
    assert written(deployed.database) == everything
    assert written(dump) == ["a", "u"]

    on_dump = {"PROCESSOR_DATABASE__URL": dump}
    refused = processor(deployed, "replay", "resume", str(deployed.config), "early", **on_dump)
    assert (refused.returncode, "made before that" in refused.stderr) == (3, True), refused.stderr
    found = replay(deployed, "start", "--all", "--execute", **on_dump)
    assert (found["processed"], found["skipped"], found["outputs"]) == (2, 1, 0), "u2 is left to the service"
    send("c")
    run_to_the_end(deployed, start, **on_dump, PROCESSOR_KAFKA__ON_DATABASE_BEHIND="reapply")
    again = replay(deployed, "start", "--all", "--name", "again", "--execute", **on_dump)
    assert (again["processed"], again["outputs"]) == (0, 0)

    assert written(dump) == sorted([*everything, "c"])
    assert sorted(json.loads(one.value() or b"")["what"] for one in outputs(deployed)) == written(dump)


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
