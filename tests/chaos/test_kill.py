"""SIGKILL at every step of the protocol, while work flows: nothing is lost, nothing is doubled."""

from __future__ import annotations

import signal

import pytest

from processor import failpoints
from tests.conftest import Deploy, Start

PROTOCOLS = ("classic", "consumer")


@pytest.mark.parametrize("point", failpoints.POINTS)
@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_killed_at_any_step_and_restarted_every_order_counts_once(
    protocol: str, point: str, deployment: Deploy, start: Start
) -> None:
    deployed = deployment(protocol=protocol)
    feed = deployed.feed()
    feed.send(300)
    with feed.flowing(rate=500):
        doomed = start(deployed, failpoints=f"{point}=kill@3")
        assert doomed.wait() == -signal.SIGKILL
        successor = start(deployed)
        successor.wait_for_partitions(deployed.partitions)
    report = deployed.verifier().assert_exactly_once()
    assert report.records > report.orders, "the feed has duplicates, or this shows less than it says"
