"""The ready file says what is so, also of a process that was killed, and of several workers."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.conftest import Deploy, Start
from tests.support import faulty_table, sending, sql
from tests.support.sending import Sent
from tests.support.waiting import eventually, throughout

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"


@pytest.mark.parametrize("workers", [1, 2])
def test_ready_file_of_a_process_that_was_killed_goes_although_the_next_one_cannot_start(
    tmp_path: Path, deployment: Deploy, start: Start, workers: int
) -> None:
    ready = tmp_path / "ready"
    deployed = deployment(settings={"run": {"ready_file": str(ready)}})
    killed = start(deployed, "--workers", str(workers))
    eventually(ready.exists, 30, lambda: f"ready{killed.tail()}")
    assert killed.kill() == -signal.SIGKILL
    assert ready.exists()
    following = start(deployed, "--workers", str(workers), PROCESSOR_DATABASE__URL=NOWHERE)
    following.wait_for("ended", exit_code=1)
    assert not ready.exists()
    if workers == 1:
        assert following.wait() == 1, following.tail()


def test_ready_file_is_there_while_all_workers_are_ready_and_no_longer(
    tmp_path: Path, deployment: Deploy, start: Start
) -> None:
    """Partition 0 calls a service that is down; the worker of partition 1 does without it.

    With static membership, a worker that comes back gets its partition, and the other one keeps its own.
    """
    ready, down = tmp_path / "ready", tmp_path / "down"
    down.touch()
    deployed = deployment(
        partitions=2,
        settings={
            "handlers": {"T": "tests.support.faulty:apply"},
            "kafka": {"static_membership": True, "session_timeout_ms": 120_000},
            "run": {"ready_file": str(ready)},
        },
    )
    sql.execute(deployed.database, faulty_table.CREATE)
    supervisor = start(deployed, "--workers", "2", TEST_DOWN_FILE=str(down))
    deployed.wait_until_shared(1, 1)
    eventually(ready.exists, 30, lambda: f"ready{supervisor.tail()}")

    calling = Sent({"what": "c", "do": "call"}, b"c", id="c", partition=0)
    sending.send(deployed.bootstrap_servers, deployed.input_topic, [calling])
    waiting = supervisor.wait_for("not_ready")["worker"]
    eventually(lambda: not ready.exists(), 10, "the ready file gone")

    # The other one ends, and its successor becomes ready.
    other = next(event for event in supervisor.events("worker_started") if event["worker"] != waiting)
    supervisor.kill_worker(other["pid"])
    successor = supervisor.wait_for("worker_started", count=3)["pid"]
    supervisor.wait_for("started", pid=successor)
    throughout(lambda: not ready.exists(), 1.0, lambda: f"one worker waits{supervisor.tail()}")

    down.unlink()
    eventually(ready.exists, 60, lambda: f"ready again{supervisor.tail()}")
    os.kill(successor, signal.SIGKILL)
    eventually(lambda: not ready.exists(), 10, "the ready file gone")
    eventually(ready.exists, 30, lambda: f"all workers are back{supervisor.tail()}")
    supervisor.terminate()
    assert supervisor.wait() == 0, supervisor.tail()
    assert not ready.exists()
