"""Handlers that block the event loop, or will not be cancelled: named while they do, and bounded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Deploy, Start
from tests.support import faulty_table, sending, sql
from tests.support.deployments import Deployment
from tests.support.sending import Sent
from tests.support.waiting import eventually

HANDLER = "tests.support.faulty:apply"


def stalling(deployment: Deploy, ready_file: Path, do: str, **settings: Any) -> Deployment:
    """One message that does so, and one behind it."""
    deployed = deployment(
        partitions=1,
        settings={
            "handlers": {"T": HANDLER},
            "run": {"stop_timeout_ms": 6_000, "ready_file": str(ready_file)},
            # Else Postgres ends the transaction of a handler that blocks for longer.
            "database": {"idle_in_transaction_timeout_ms": 60_000},
            **settings,
        },
    )
    sql.execute(deployed.database, faulty_table.CREATE)
    sending.send(
        deployed.bootstrap_servers,
        deployed.input_topic,
        [Sent({"what": "m0", "do": do}, id="m0"), Sent({"what": "m1"}, id="m1")],
    )
    return deployed


def is_gone(file: Path) -> bool:
    return not file.exists()


def test_handler_that_blocks_the_event_loop_is_named_meanwhile_and_sigterm_is_obeyed_in_time(
    deployment: Deploy, start: Start, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    process = start(stalling(deployment, ready, "block for ever"))
    blocked = process.wait_for("event_loop_blocked")
    assert blocked["handler"] == HANDLER
    assert "(m0)" in blocked["at"]
    assert "faulty.py" in blocked["where"]
    eventually(lambda: is_gone(ready), 10, "not ready")
    process.terminate()
    process.wait_for("stopping")
    assert process.wait() == 0, process.tail()


@pytest.mark.parametrize("workers", [1, 2])
def test_second_signal_ends_a_process_whose_event_loop_is_blocked_at_once(
    deployment: Deploy, start: Start, tmp_path: Path, workers: int
) -> None:
    deployed = stalling(deployment, tmp_path / "ready", "block for ever", run={"stop_timeout_ms": 3_600_000})
    process = start(deployed, "--workers", str(workers))
    blocked = process.wait_for("event_loop_blocked")
    process.terminate()
    process.wait_for("stopping", worker=blocked.get("worker"))
    process.terminate()
    assert process.wait() == 128 + 15, process.tail()


@pytest.mark.parametrize("asked_to_stop", [False, True])
def test_handler_that_blocks_past_its_time_out_is_said_and_the_process_goes_on_or_stops_as_asked(
    deployment: Deploy, start: Start, tmp_path: Path, asked_to_stop: bool
) -> None:
    ready = tmp_path / "ready"
    deployed = stalling(deployment, ready, "block a while", failure={"timeout_ms": 1_000})
    process = start(deployed)
    process.wait_for("event_loop_blocked", handler=HANDLER)
    if asked_to_stop:
        process.terminate()
        process.wait_for("stopping")
    else:
        process.wait_for("event_loop_free_again")
        deployed.verifier().wait_until_done()
        eventually(ready.exists, 10, "ready again")
        process.terminate()
    assert process.wait() == 0, process.tail()
    assert not process.events("text"), process.tail()


def test_handler_that_swallows_its_cancellation_is_named_and_ends_its_process_at_a_deadline(
    deployment: Deploy, start: Start, tmp_path: Path
) -> None:
    ready = tmp_path / "ready"
    process = start(stalling(deployment, ready, "swallow", failure={"timeout_ms": 1_000}))
    busy = process.wait_for("handler_busy", handler=HANDLER)
    assert busy["timeout_seconds"] == 1
    stuck = process.wait_for("handler_stuck", handler=HANDLER)
    assert "(m0)" in stuck["at"]
    eventually(lambda: is_gone(ready), 10, "not ready")
    assert process.wait() == 1, process.tail()
    assert process.events("handler_ended_with_its_process", handler=HANDLER)


def test_handler_that_swallows_its_cancellation_does_not_keep_a_process_that_is_asked_to_stop(
    deployment: Deploy, start: Start, tmp_path: Path
) -> None:
    process = start(stalling(deployment, tmp_path / "ready", "swallow", failure={"timeout_ms": 4_000}))
    process.wait_for("handler_busy")
    process.terminate()
    assert process.wait() == 0, process.tail()


@pytest.mark.parametrize("left", ["a task", "threads"])
def test_process_that_halts_and_cannot_close_ends_in_time_with_the_code_of_its_halt(
    deployment: Deploy, start: Start, tmp_path: Path, left: str
) -> None:
    """By what a handler has left behind: closing waits for a thread, or the event loop's end for a task."""
    failing = {"failure": {"policy": "halt"}, "run": {"stop_timeout_ms": 2_000}}
    deployed = stalling(deployment, tmp_path / "ready", f"leave {left} behind", **failing)
    process = start(deployed)
    halted = process.wait_for("partition_halted")
    assert process.wait() == 3, process.tail()
    (timed_out,) = process.events("stop_timed_out")
    assert timed_out["exit_code"] == 3
    assert halted["reason"] in timed_out["reason"]
