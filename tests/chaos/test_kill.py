"""SIGKILL at every step of the protocol, while work flows: nothing is lost, nothing is doubled."""

from __future__ import annotations

import random
import signal

import pytest

from processor import failpoints
from tests.conftest import Deploy, Start
from tests.support.deployments import Deployment

# Which pass of the point kills. A first pass of the Kafka steps is often the recovery itself, which then dies too.
SECOND_KILLS = {"after_claim": 1, "after_postgres_commit": 1, "after_produce": 1, "after_offsets": 1}
KILLS = [(point, 3 if index % 2 else 2) for index, point in enumerate(failpoints.POINTS)]
KILLS += list(SECOND_KILLS.items())

BACKLOG = 60_000


@pytest.mark.parametrize("handler", ["reserve"])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_killed_at_every_step_and_restarted_each_order_counts_once(
    protocol: str, handler: str, deployment: Deploy, start: Start, subtests: pytest.Subtests
) -> None:
    """Each process repairs what its predecessor left and is killed itself, at the next point.

    The judge looks after each kill: a fault found then is of the recovery from the kill before, or of this one.
    """
    deployed = deployment(protocol=protocol, handler=handler)
    feed = deployed.feed()
    feed.send(300)
    before = "a clean start"
    with feed.flowing(rate=100):
        for point, number in KILLS:
            with subtests.test(f"{before}, then SIGKILL {point}@{number}"):
                doomed = start(deployed, failpoints=f"{point}=kill@{number}")
                assert doomed.wait() == -signal.SIGKILL, doomed.tail()
                _assert_right_so_far(deployed, f"after {before}, then SIGKILL at {point}")
            before = f"SIGKILL {point}@{number}"
        survivor = start(deployed)
        survivor.wait_for_partitions(deployed.partitions)
    report = deployed.verifier().assert_exactly_once()
    assert report.records > report.orders, "without duplicates in the feed this would show less than it says"


# Inside the claim, with all of a batch's rows written, between the commits, and in the middle of publishing.
FULL_SPEED_KILLS = [("after_claim", 2), ("after_postgres_commit", 2), ("after_produce", 3), ("before_kafka_commit", 2)]
RANDOM_KILLS = 2


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_killed_at_full_speed_in_the_middle_of_a_backlog_each_order_counts_once(
    protocol: str, deployment: Deploy, start: Start, subtests: pytest.Subtests
) -> None:
    """Thousands of records in each transaction, and the next ones read, decoded and claimed beside its publication."""
    deployed = deployment(protocol=protocol, handler="reserve_many", settings={"profile": "throughput", "batch": None})
    verifier = deployed.verifier()
    feed = deployed.feed()
    feed.send(BACKLOG)
    for point, number in FULL_SPEED_KILLS:
        with subtests.test(f"SIGKILL {point}@{number}"):
            doomed = start(deployed, failpoints=f"{point}=kill@{number}")
            assert doomed.wait() == -signal.SIGKILL, doomed.tail()
    for kill in range(RANDOM_KILLS):
        more = random.Random(f"{protocol} {kill}").randrange(1, 3000)
        with subtests.test(f"SIGKILL after {more} records"):
            doomed = start(deployed)
            verifier.wait_until_committed(more)
            assert doomed.kill() == -signal.SIGKILL, doomed.tail()
            assert not verifier.is_done(), "this was to happen in the middle of the backlog"
    start(deployed)
    report = verifier.assert_exactly_once()
    assert report.records == BACKLOG > report.orders, "without duplicates in the feed this would show less than it says"


def _assert_right_so_far(deployed: Deployment, when: str) -> None:
    report = deployed.verifier().judge()
    assert not report.faults, f"{when}: {report}"
