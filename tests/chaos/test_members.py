"""Processes come and go under load, some without a word, some frozen and back: one owner at a time writes."""

from __future__ import annotations

import signal

import pytest

from tests.chaos.conftest import Fragile
from tests.conftest import Deploy, Start
from tests.support import sql
from tests.support.deployments import Deployment
from tests.support.processes import Process
from tests.support.waiting import eventually


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_members_join_and_leave_under_load_and_each_order_counts_once(
    protocol: str, deployment: Deploy, start: Start
) -> None:
    deployed = deployment(protocol=protocol, handler="reserve_many", partitions=8)
    feed = deployed.feed()
    with feed.flowing(rate=500):
        first = start(deployed)
        first.wait_for_partitions(8)
        second, third = start(deployed), start(deployed)
        second.wait_for_partitions(1)
        third.wait_for_partitions(1)

        first.kill()
        inherited = [len(member.events("partition_ready")) for member in (second, third)]
        heir = second if inherited[0] <= inherited[1] else third
        heir.wait_for_partitions(min(inherited) + 1)

        fourth = start(deployed)
        fourth.wait_for_partitions(1)
        second.terminate()
        assert second.wait() == 0, second.tail()
        fourth.wait_for_partitions(2)
    report = deployed.verifier().assert_exactly_once()
    assert report.orders > 1000
    for member in (third, fourth):
        member.terminate()
        assert member.wait() == 0, member.tail()
    for member in (second, third, fourth):
        assert_no_errors(member)


def assert_no_errors(process: Process) -> None:
    """What belongs to a rebalance is no error."""
    assert [event for event in process.all_events() if event.get("level") in ("error", "critical")] == []


@pytest.mark.parametrize(("protocol", "point"), [("classic", "after_offsets"), ("consumer", "before_kafka_commit")])
def test_the_open_kafka_transaction_of_a_member_that_was_killed_is_ended_by_those_who_live(
    protocol: str, point: str, deployment: Deploy, start: Start
) -> None:
    """Neither the new owner nor a reader of outputs waits for its time-out, which is longer than this test waits."""
    deployed = deployment(protocol=protocol, settings={"kafka": {"transaction_timeout_ms": 600_000}})
    verifier = deployed.verifier()
    feed = deployed.feed()
    with feed.flowing(rate=200):
        survivor = start(deployed)
        survivor.wait_for_partitions(deployed.partitions)
        doomed = start(deployed, failpoints=f"{point}=kill@3")
        assert doomed.wait() == -signal.SIGKILL, doomed.tail()
        moved = len(doomed.events("partition_ready"))
        survivor.wait_for("left_open_ended")
        survivor.wait_for_partitions(deployed.partitions + moved)
    verifier.assert_exactly_once()
    survivor.terminate()
    assert survivor.wait() == 0, survivor.tail()


SLOT_SESSIONS = """
    SELECT DISTINCT pid FROM pg_locks
    WHERE locktype = 'advisory' AND objsubid = 2 AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
"""
END_SESSIONS = """
    SELECT pg_terminate_backend(pid) FROM pg_stat_activity
    WHERE datname = current_database() AND application_name = $1
"""


def slots(deployed: Deployment) -> int:
    return len(sql.fetch(deployed.database, SLOT_SESSIONS))


def test_workers_that_lose_all_connections_to_postgres_at_once_do_not_fence_each_other(
    deployment: Deploy, start: Start
) -> None:
    """As in a failover: every slot looks free until its owner is back."""
    deployed = deployment(handler="reserve_many", partitions=6)
    verifier = deployed.verifier()
    members = [start(deployed) for _ in range(3)]
    with deployed.feed().flowing(rate=200):
        for member in members:
            member.wait_for("partition_ready")
        for _ in range(4):
            verifier.wait_until_committed(50)
            sql.fetch(deployed.database, END_SESSIONS, f"processor:{deployed.consumer}")
            eventually(lambda: slots(deployed) == len(members), 30, "every worker has a slot again")
        verifier.wait_until_committed(200)
    verifier.assert_exactly_once()
    for member in members:
        assert_never_fenced(member)
    for member in members:  # only now: who stops leaves a slot to be tidied up by those who stay
        member.terminate()
        assert member.wait() == 0, member.tail()


def test_worker_whose_other_connections_are_cut_off_keeps_its_slot(deployment: Deploy, start: Start) -> None:
    """What is cancelled or lost on the control connection must not make it look dead while its producer lives."""
    deployed = deployment(handler="reserve_many", partitions=4)
    verifier = deployed.verifier()
    members = [start(deployed) for _ in range(2)]
    with deployed.feed().flowing(rate=200):
        for member in members:
            member.wait_for("partition_ready")
        for _ in range(3):
            verifier.wait_until_committed(50)
            others = f"{END_SESSIONS} AND pid NOT IN ({SLOT_SESSIONS})"
            sql.fetch(deployed.database, others, f"processor:{deployed.consumer}")
        verifier.wait_until_committed(100)
        assert slots(deployed) == len(members)
    verifier.assert_exactly_once()
    for member in members:
        assert_never_fenced(member)


def test_workers_do_not_fence_each_other_when_postgres_has_been_restarted(
    fragile: Fragile, deployment: Deploy, start: Start
) -> None:
    """Who waits longest before it tries again is back last, and is no dead process for that."""
    deployed = deployment(
        handler="reserve_many", partitions=6, stack=fragile.addresses, database=fragile.databases.migrated()
    )
    verifier = deployed.verifier()
    members = [start(deployed) for _ in range(3)]
    with deployed.feed().flowing(rate=200):
        for member in members:
            member.wait_for("partition_ready")
        verifier.wait_until_committed(50)
        fragile.stack.postgres.kill()
        for member in members:
            member.wait_for("starting_over", kind="ConnectionLost")
        fragile.stack.postgres.start()
        eventually(lambda: slots(deployed) == len(members), 30, "every worker has a slot again")
        verifier.wait_until_committed(200)
    verifier.assert_exactly_once()
    for member in members:
        assert_never_fenced(member)
    for member in members:  # only now: who stops leaves a slot to be tidied up by those who stay
        member.terminate()
        assert member.wait() == 0, member.tail()


def assert_never_fenced(member: Process) -> None:
    assert not member.events("left_open_ended"), member.tail()
    assert not member.events("starting_over", kind="Fenced"), member.tail()
    assert len(member.events("producer_ready")) == 1, member.tail()


# Where the zombie freezes: inside an open Postgres transaction, in the middle of a statement or between two, between
# the two commits, inside an open Kafka transaction without and with its offsets.
ZOMBIES = [
    ("classic", "after_prepare"),
    ("consumer", "after_prepare"),
    ("classic", "after_handlers"),
    ("consumer", "after_ledger"),
    ("classic", "after_postgres_commit"),
    ("consumer", "after_produce"),
    ("classic", "after_offsets"),
    ("consumer", "before_kafka_commit"),
]


@pytest.mark.parametrize(("protocol", "point"), ZOMBIES)
def test_a_frozen_process_that_wakes_up_replaced_writes_nothing_and_rejoins(
    protocol: str, point: str, deployment: Deploy, start: Start
) -> None:
    deployed = deployment(
        protocol=protocol,
        settings={"kafka": {"transaction_timeout_ms": 2_000}, "database": {"idle_in_transaction_timeout_ms": 1_000}},
    )
    verifier = deployed.verifier()
    feed = deployed.feed()
    feed.send(400)
    zombie = start(deployed, failpoints=f"{point}=stop@2")
    zombie.wait_until_frozen()

    successor = start(deployed)
    successor.wait_for_partitions(deployed.partitions)
    feed.send(200)
    verifier.assert_exactly_once()
    before = _written(deployed)
    if point == "after_prepare":
        assert successor.events("frozen_session_ended"), (
            "who holds the keys is not idle to Postgres, so it was to be us"
        )

    assigned = len(zombie.events("partitions_assigned"))
    zombie.cont()
    zombie.wait_for("partitions_assigned", count=assigned + 1)
    # It may have noticed the loss by the group, by a refused write, or both; it must have noticed.
    assert zombie.events("partitions_lost") or zombie.events("starting_over"), zombie.tail()
    assert _written(deployed) == before, "nothing came in meanwhile, so nothing may have been written"

    feed.send(200)
    verifier.assert_exactly_once()
    for member in (zombie, successor):
        member.terminate()
        assert member.wait() == 0, member.tail()
    verifier.assert_exactly_once()


def _written(deployed: Deployment) -> tuple[int, int]:
    report = deployed.verifier().judge(everything=True)
    assert not report.faults, str(report)
    return report.rows, report.outputs


def test_sigterm_under_load_leaves_nothing_open_and_the_next_start_goes_on(deployment: Deploy, start: Start) -> None:
    deployed = deployment()
    verifier = deployed.verifier()
    feed = deployed.feed()
    feed.send(3000)
    with feed.flowing(rate=300):
        process = start(deployed)
        process.wait_for_partitions(deployed.partitions)
        verifier.wait_until_committed(500)
        process.terminate()
        assert process.wait(10) == 0, process.tail()
        assert verifier.open_transactions() == [], "a reader of committed data would wait for the transaction's end"
        assert sql.value(deployed.database, "SELECT count(*) FROM unsent") == 0
        report = verifier.judge()
        assert not report.faults, str(report)
        assert report.rows == report.outputs < report.orders, "it was stopped under load, with nothing half done"
        following = start(deployed)
        following.wait_for("partition_ready", found="in_step", count=deployed.partitions)
    verifier.assert_exactly_once()


def test_a_killed_worker_is_replaced_and_one_sigterm_stops_all(deployment: Deploy, start: Start) -> None:
    deployed = deployment(handler="reserve_many")
    feed = deployed.feed()
    with feed.flowing(rate=300):
        supervisor = start(deployed, "--workers", "2")
        supervisor.wait_for("started", count=2)
        supervisor.wait_for("partition_ready")
        victim = supervisor.workers()[0]
        supervisor.kill_worker(victim)
        supervisor.wait_for("worker_ended", pid=victim, exit_code=-signal.SIGKILL)
        replacement = supervisor.wait_for("worker_started", count=3)["pid"]
        supervisor.wait_for("started", pid=replacement)
    deployed.verifier().assert_exactly_once()
    supervisor.terminate()
    assert supervisor.wait() == 0, supervisor.tail()
    assert len(supervisor.events("stopped")) == 2, "both workers left in an orderly way"
    assert_each_line_names_its_worker(supervisor)
    deployed.verifier().assert_exactly_once()


def assert_each_line_names_its_worker(supervisor: Process) -> None:
    numbers = {event["pid"]: event["worker"] for event in supervisor.events("worker_started")}
    for event in supervisor.events("started"):
        assert event["worker"] == numbers[event["pid"]]
    unnamed = {event["event"] for event in supervisor.all_events() if "worker" not in event}
    assert unnamed <= {"stopping_workers"}, "lines of the parent about all of them"


def test_a_static_member_that_is_killed_and_started_again_gets_its_partitions_back_without_a_rebalance(
    deployment: Deploy, start: Start
) -> None:
    """The session is longer than this test waits: nobody can have got them by its end."""
    kafka = {"static_membership": True, "session_timeout_ms": 120_000}
    deployed = deployment(handler="reserve_many", settings={"kafka": kafka})
    feed = deployed.feed()
    with feed.flowing(rate=300):
        service = start(deployed, "--workers", "2")
        deployed.wait_until_shared(2, 2)
        deployed.verifier().wait_until_committed(200)
        ready, revoked = len(service.events("partition_ready")), len(service.events("partitions_revoked"))
        victim = service.workers()[0]
        service.kill_worker(victim)
        service.wait_for("worker_ended", pid=victim, exit_code=-signal.SIGKILL)
        service.wait_for_partitions(ready + 2)
        assert len(service.events("partitions_revoked")) == revoked, "the other worker's partitions were touched"
    deployed.verifier().assert_exactly_once()
    assert not service.events("starting_over")
    service.terminate()
    assert service.wait() == 0, service.tail()


def test_a_rolling_restart_of_static_members_causes_no_rebalance(deployment: Deploy, start: Start) -> None:
    kafka = {"static_membership": True, "session_timeout_ms": 120_000}
    deployed = deployment(handler="reserve_many", settings={"kafka": kafka})
    feed = deployed.feed()
    with feed.flowing(rate=300):
        stays, leaves = start(deployed), start(deployed)
        deployed.wait_until_shared(2, 2)
        leaves.wait_for("partition_ready")
        before = [len(stays.events(name)) for name in ("partitions_assigned", "partitions_revoked")]
        leaves.terminate()
        assert leaves.wait() == 0, leaves.tail()
        returns = start(deployed)
        returns.wait_for_partitions(deployed.partitions // 2)
        assert [len(stays.events(name)) for name in ("partitions_assigned", "partitions_revoked")] == before
    deployed.verifier().assert_exactly_once()


def test_workers_stop_when_their_supervisor_is_killed(deployment: Deploy, start: Start) -> None:
    deployed = deployment(handler="reserve_many")
    feed = deployed.feed()
    feed.send(500)
    supervisor = start(deployed, "--workers", "2")
    supervisor.wait_for("started", count=2)
    supervisor.wait_for("partitions_assigned")
    # The log ends when the last worker has ended: they have inherited it.
    assert supervisor.kill() == -signal.SIGKILL
    assert len(supervisor.events("stopping", reason="supervisor gone")) == 2, supervisor.tail()
    assert len(supervisor.events("stopped")) == 2, supervisor.tail()
    start(deployed).wait_for_partitions(deployed.partitions)
    deployed.verifier().assert_exactly_once()
