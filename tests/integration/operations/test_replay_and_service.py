"""`processor replay` and the service whose records it goes over: neither spoils what the other has."""

from __future__ import annotations

import signal
import threading
from collections import Counter
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from tests.conftest import Deploy, Start
from tests.support import faulty_table, sending, sql
from tests.support.deployments import Deployment
from tests.support.reading import read_all
from tests.support.replaying import processor, replay, serve, started
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


def written(deployed: Deployment) -> int:
    """How many messages have had their effect."""
    found: int = sql.value(deployed.database, "SELECT count(*) FROM effects")
    return found


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
    assert written(deployed) == 0
    for verb in ("resume", "pause", "cancel"):
        refused = processor(deployed, "replay", verb, str(deployed.config), "given-up")
        assert (refused.returncode, "is cancelled" in refused.stderr) == (2, True), refused.stderr
    replay(deployed, "start", "--all", "--execute")
    assert written(deployed) == 2


def test_a_paused_replay_can_be_cancelled(deployed: Deployment, start: Start) -> None:
    serve(deployed, start, *messages(*(f"n{number}" for number in range(200))), PROCESSOR_KAFKA__START="latest")
    with started(deployed, "start", "--all", "--name", "slow", "--rate", "10", "--execute") as running:
        eventually(lambda: written(deployed), 30, "some are done")
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


def test_each_message_is_done_once_by_the_service_or_by_a_replay_beside_it(deployed: Deployment, start: Start) -> None:
    serve(deployed, start, *messages(*(f"missing {n}" for n in range(300))), PROCESSOR_KAFKA__START="latest")
    service = start(deployed)
    service.wait_for_partitions(deployed.partitions)
    with started(deployed, "start", "--all", "--execute", "--rate", "500") as running:
        for first in range(0, 300, 25):
            new = messages(*(f"new {n}" for n in range(first, first + 25)))
            sending.send(deployed.bootstrap_servers, deployed.input_topic, new)
        stdout, stderr = running.communicate(timeout=60)
    assert running.returncode == 0, stdout + stderr
    deployed.verifier().wait_until_done()
    service.terminate()
    assert service.wait() == 0, service.tail()
    applied = [row["what"] for row in sql.fetch(deployed.database, "SELECT what FROM effects")]
    sent = [one.value() for one in read_all(deployed.bootstrap_servers, deployed.output_topic)]
    assert (len(applied), set(Counter(applied).values())) == (600, {1})
    assert (len(sent), set(Counter(sent).values())) == (600, {1})


def test_a_replay_stands_still_while_the_service_falls_behind_and_goes_on_after_that(
    deployed: Deployment, start: Start
) -> None:
    """The service is played by the test: its position moves, and the log grows faster."""
    serve(deployed, start, *messages(*(f"n{n}" for n in range(2000))), PROCESSOR_KAFKA__START="latest")
    arguments = ("start", "--partition", "0:0-2000", "--name", "slow", "--execute", "--rate", "10")
    with started(deployed, *arguments, PROCESSOR_BATCH__MAX_MESSAGES="2") as running:
        waits = threading.Event()
        said: list[str] = []

        def listen() -> None:
            assert running.stderr is not None
            for line in running.stderr:
                said.append(line)
                if "waiting: the service falls behind" in line:
                    waits.set()

        listening = threading.Thread(target=listen)
        listening.start()
        while not waits.is_set() and running.poll() is None:
            sending.send(deployed.bootstrap_servers, deployed.input_topic, messages("x", "y", "z"))
            move = "UPDATE ledger SET next_offset = next_offset + 1 WHERE consumer = $1"
            sql.execute(deployed.database, move, deployed.consumer)
        assert waits.is_set(), said
        done = written(deployed)
        eventually(lambda: written(deployed) > done + 20, 30, "it goes on")
        replay(deployed, "cancel", "slow")
        assert running.wait(30) == 0, said
        listening.join()


def test_times_bound_a_range_and_one_past_the_end_means_the_end(deployed: Deployment, start: Start) -> None:
    serve(deployed, start, *messages("a", "b"))
    now = datetime.now(UTC)
    before, after = (now - timedelta(hours=1)).isoformat(), (now + timedelta(hours=1)).isoformat()
    (whole,) = replay(deployed, "start", "--since", before, "--until", after)["ranges"]
    assert (whole["first"], whole["end"]) == (0, 2)
    assert replay(deployed, "start", "--since", after)["ranges"] == []
    assert replay(deployed, "start", "--until", "1h")["ranges"] == []
