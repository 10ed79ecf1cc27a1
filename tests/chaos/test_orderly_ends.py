"""Ends that are no deaths: real processes that are told to stop, or lose a partition, in the middle of a call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.chaos.test_effects import Billing, billing
from tests.conftest import Deploy, Start
from tests.support.gateway import Gateway
from tests.support.processes import Process
from tests.support.waiting import eventually

QUARANTINE_AFTER = 2
ROUNDS = QUARANTINE_AFTER + 1


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as serving:
        yield serving


def blocked_billing(deployment: Deploy, gateway: Gateway) -> Billing:
    """One in which a call that is not answered is soon cut off."""
    return billing(deployment, gateway, failure={"quarantine_after": QUARANTINE_AFTER}, run={"stop_timeout_ms": 3_000})


def wait_for_call(due: Billing, process: Process) -> None:
    """Until one of the calls under way is this process'."""
    eventually(
        lambda: any(f":{process.pid}:" in (row["lease_owner"] or "") for row in due.inbox()),
        30,
        lambda: f"a call: {due.inbox()}{process.tail()}",
    )


def assert_nobody_was_blamed(due: Billing, *processes: Process) -> None:
    due.wait_until_done()
    due.assert_charged_once()
    assert {row["status"] for row in due.inbox()} == {"completed"}
    for process in processes:
        assert not process.events("message_failed"), process.tail()


def test_call_that_is_cut_off_by_one_orderly_stop_after_the_other_is_not_quarantined(
    deployment: Deploy, start: Start, gateway: Gateway
) -> None:
    due = blocked_billing(deployment, gateway)
    due.send(1)
    with gateway.blocked():
        for _ in range(ROUNDS):
            process = start(due.deployed)
            wait_for_call(due, process)
            process.terminate()
            assert process.wait() == 0, process.tail()
            assert process.events("stopped_with_work_rolled_back"), process.tail()
    assert_nobody_was_blamed(due, start(due.deployed))


def test_calls_that_are_cut_off_by_one_rebalance_after_the_other_are_not_quarantined(
    deployment: Deploy, start: Start, gateway: Gateway
) -> None:
    due = blocked_billing(deployment, gateway)
    due.send(2)
    with gateway.blocked():
        first = start(due.deployed)
        wait_for_call(due, first)
        for _ in range(ROUNDS):
            other = start(due.deployed)
            wait_for_call(due, other)
            other.terminate()
            assert other.wait() == 0, other.tail()
    assert_nobody_was_blamed(due, first)
