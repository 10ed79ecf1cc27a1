"""`processor replay` and the service whose records it goes over: neither spoils what the other has."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.conftest import Deploy, Start
from tests.support import faulty_table, sending, sql
from tests.support.deployments import Deployment
from tests.support.replaying import processor, replay, started
from tests.support.sending import Sent
from tests.support.waiting import eventually

SETTINGS = {"handlers": {"T": "tests.support.faulty:apply"}, "retry": {"attempts": 3, "first_delay_ms": 1}}


def messages(*names: str, do: str | None = None) -> list[Sent]:
    return [Sent({"what": name, "do": do}, name.encode(), "T", name) for name in names]


@pytest.fixture
def deployed(deployment: Deploy) -> Deployment:
    made = deployment(partitions=1, settings=SETTINGS)
    sql.execute(made.database, faulty_table.CREATE)
    return made


def serve(deployed: Deployment, start: Start, *records: Sent, **environ: str) -> None:
    """Let the service process these."""
    sending.send(deployed.bootstrap_servers, deployed.input_topic, records)
    service = start(deployed, **environ)
    service.wait_for_partitions(deployed.partitions)
    deployed.verifier().wait_until_done()
    service.terminate()
    assert service.wait() == 0, service.tail()


def test_what_the_service_has_written_about_its_troubles_stays(deployed: Deployment, start: Start) -> None:
    serve(deployed, start, *messages("a"))
    sql.execute(
        deployed.database,
        "INSERT INTO partition_trouble SELECT consumer, topic, partition, 'halted', 'as the test says', now(), epoch, 0"
        " FROM ledger",
    )
    before = sql.fetch(deployed.database, "SELECT * FROM partition_trouble")
    replay(deployed, "start", "--all", "--execute")
    assert sql.fetch(deployed.database, "SELECT * FROM partition_trouble") == before != []


def test_a_cancelled_replay_commits_nothing_more_whatever_its_process_was_about_to_do(
    deployed: Deployment, start: Start
) -> None:
    """Retention may forget at once what it would have needed."""
    serve(deployed, start, *messages("a", "b"), PROCESSOR_KAFKA__START="latest")
    arguments = ("start", "--all", "--name", "given-up", "--execute")
    with started(deployed, *arguments, PROCESSOR_FAILPOINTS="before_ledger=stop") as running:
        process = psutil.Process(running.pid)
        eventually(lambda: process.status() == psutil.STATUS_STOPPED, 30, "it is frozen in its batch")
        assert replay(deployed, "cancel", "given-up", "--reason", "too late")["state"] == "cancelled"
        running.send_signal(signal.SIGCONT)
        stdout, stderr = running.communicate(timeout=30)
    assert (running.returncode, "given-up: cancelled: 0 processed" in stdout) == (0, True), stdout + stderr
    assert sql.value(deployed.database, "SELECT count(*) FROM effects") == 0
    for verb in ("resume", "pause", "cancel"):
        refused = processor(deployed, "replay", verb, str(deployed.config), "given-up")
        assert (refused.returncode, "is cancelled" in refused.stderr) == (2, True), refused.stderr
    replay(deployed, "start", "--all", "--execute")
    assert sql.value(deployed.database, "SELECT count(*) FROM effects") == 2


def test_a_paused_replay_can_be_cancelled(deployed: Deployment, start: Start) -> None:
    serve(deployed, start, *messages(*(f"n{number}" for number in range(200))), PROCESSOR_KAFKA__START="latest")
    with started(deployed, "start", "--all", "--name", "slow", "--rate", "10", "--execute") as running:
        eventually(lambda: sql.value(deployed.database, "SELECT count(*) FROM effects"), 30, "some are done")
        replay(deployed, "pause", "slow")
        running.communicate(timeout=30)
    assert replay(deployed, "cancel", "slow")["state"] == "cancelled"


DRY = ("--all", "--mode", "dry-run", "--execute")


def test_a_dry_run_blames_no_message_for_a_deadlock(deployed: Deployment, start: Start) -> None:
    serve(deployed, start, *messages("a"), *messages("b", do="deadlock twice"), *messages("c"))
    report = replay(deployed, "start", *DRY)
    assert (report["processed"], report["failed"], report["comparison"]["same"]) == (3, 0, 3)


def test_a_dry_run_blames_no_message_for_an_outage(deployed: Deployment, start: Start, tmp_path: Path) -> None:
    serve(deployed, start, *messages("a"), *messages("b", do="call"))
    done = processor(deployed, "replay", "start", str(deployed.config), *DRY, TEST_DOWN_FILE=str(tmp_path))
    assert (done.returncode, "the handlers cannot run: as long as" in done.stderr) == (1, True), done.stderr


def test_a_topic_to_which_nothing_is_sent_need_not_exist(deployed: Deployment, start: Start) -> None:
    serve(deployed, start, *messages("a"))
    arguments = ("start", "--all", "--mode", "re-apply", "--scope", "model", "--no-outputs", "--execute")
    assert replay(deployed, *arguments, TEST_OUTPUT_TOPIC="nowhere")["processed"] == 1


def test_a_message_that_was_given_up_halts_no_replay(deployed: Deployment, start: Start) -> None:
    serve(deployed, start, Sent(b"{", b"k", "T", "given up"), *messages("a"))
    discarded = processor(
        deployed, "dlq", "discard", str(deployed.config), "--id", "given up", "--reason", "no", "--yes"
    )
    assert discarded.returncode == 0, discarded.stderr
    found = replay(deployed, "start", "--all", "--execute", PROCESSOR_FAILURE__POLICY="halt")
    assert (found["state"], found["skipped"]) == ("finished", 2)


def test_retention_waits_for_a_replay_also_before_its_first_round(deployed: Deployment, start: Start) -> None:
    """The watermarks have to exist, so that whoever writes a replay down can hold them."""
    serve(deployed, start, *messages("a"))
    replay(deployed, "start", "--all", "--execute")
    held = "SELECT count(*) FROM forgotten JOIN replay_ranges r ON r.live_partition_id = forgotten.partition_id"
    assert sql.value(deployed.database, held) == 1
