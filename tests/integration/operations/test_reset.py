"""`processor reset`: the position of a service that stands still is moved, and nothing is lost or doubled by it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.conftest import Deploy, Start
from tests.support import sql
from tests.support.deployments import Deployment
from tests.support.replaying import processor
from tests.support.waiting import eventually


def reset(deployed: Deployment, *arguments: str, code: int = 0) -> str:
    done = processor(deployed, "reset", str(deployed.config), *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_a_rewind_while_outputs_are_stored_sends_each_of_them_once(
    protocol: str, deployment: Deploy, start: Start, tmp_path: Path
) -> None:
    """Without the note in the offset's metadata, the next start could not know which of them Kafka has."""
    deployed = deployment(protocol=protocol)
    deployed.feed().send(600)
    service = start(deployed, failpoints="after_kafka_commit=kill@4")
    assert service.wait() == -signal.SIGKILL, service.tail()
    command = ("reset", str(deployed.config), "--earliest", "--dry-run")
    eventually(lambda: processor(deployed, *command).returncode == 0, 20, "the group without the dead member")
    before = deployed.verifier().committed()
    assert any(before.values())

    shown = json.loads(reset(deployed, "--earliest", "--dry-run", "-o", "json"))
    assert {one["partition"]: one["before"] for one in shown["moved"]} == {at: k for at, k in before.items() if k}
    assert deployed.verifier().committed() == before
    undo = tmp_path / "undo.json"
    reset(deployed, "--earliest", "--yes", "--undo-file", str(undo))
    assert set(deployed.verifier().committed().values()) == {0}

    reset(deployed, "--undo", str(undo), "--yes", "--undo-file", str(tmp_path / "redo.json"))
    assert deployed.verifier().committed() == before
    reset(deployed, "--undo", str(tmp_path / "redo.json"), "--yes", "--undo-file", str(tmp_path / "third.json"))
    assert set(deployed.verifier().committed().values()) == {0}

    again = start(deployed)
    again.wait_for("partition_ready", found="rewound", start=0)
    deployed.verifier().assert_exactly_once()
    assert "is running" in reset(deployed, "--latest", "--yes", code=2)
    again.terminate()
    assert again.wait() == 0, again.tail()
    assert "the service has run since" in reset(deployed, "--undo", str(undo), "--yes", code=2)


def test_a_reset_below_what_was_forgotten_or_outside_the_log_is_refused_with_what_is_safe(
    deployment: Deploy, start: Start, tmp_path: Path
) -> None:
    deployed = deployment(partitions=1)
    deployed.feed(duplicates=0).send(50)
    service = start(deployed)
    deployed.verifier().wait_until_done()
    service.terminate()
    assert service.wait() == 0, service.tail()
    sql.execute(deployed.database, "INSERT INTO forgotten (partition_id, below) SELECT partition_id, 20 FROM ledger")

    assert "Kafka has the offsets 0-50: 90 is not among them" in reset(deployed, "--to", "90", "--yes", code=2)
    assert "Safe: 20-50" in reset(deployed, "--to", "10", "--yes", code=3)
    assert deployed.verifier().committed() == {0: 50}
    reset(deployed, "--to", "10", "--yes", "--despite-forgotten", "--undo-file", str(tmp_path / "undo.json"))
    accepted = sql.value(deployed.database, "SELECT accepted FROM forgotten")
    assert (deployed.verifier().committed(), accepted) == ({0: 10}, 10)
    reset(deployed, "--undo", str(tmp_path / "undo.json"), "--yes", "--undo-file", str(tmp_path / "redo.json"))
    accepted = sql.value(deployed.database, "SELECT accepted FROM forgotten")
    assert (deployed.verifier().committed(), accepted) == ({0: 50}, None), "a later rewind is not accepted"

    sql.execute(deployed.database, "UPDATE forgotten SET below = 0")
    for number, (where, offset) in enumerate([(("--to", "30"), 30), (("--latest",), 50), (("--since", "1h"), 0)]):
        reset(deployed, *where, "--yes", "--undo-file", str(tmp_path / f"undo-{number}.json"))
        assert deployed.verifier().committed() == {0: offset}
