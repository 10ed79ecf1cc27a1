"""SIGKILL in the middle of a backlog, with batches as large as they get: nothing is lost, nothing is doubled."""

from __future__ import annotations

import random
import signal

import pytest

from tests.conftest import Deploy, Start

BACKLOG = 40_000
# Inside the claim, with all of a batch's rows written, between the commits, and in the middle of publishing.
# Between the commits with several batches that wait for Kafka together.
KILLS = [("after_claim", 2), ("after_postgres_commit", 3), ("after_produce", 2), ("before_kafka_commit", 2)]
RANDOM_KILLS = 2


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_killed_at_full_speed_in_the_middle_of_a_backlog_each_order_counts_once(
    protocol: str, deployment: Deploy, start: Start, subtests: pytest.Subtests
) -> None:
    """Thousands of records in each transaction, and the next ones read, decoded and claimed beside its publication."""
    settings = {"profile": "throughput", "batch": {"max_messages": 2000}}
    deployed = deployment(protocol=protocol, handler="reserve_many", settings=settings)
    verifier = deployed.verifier()
    feed = deployed.feed()
    feed.send(BACKLOG)
    for point, number in KILLS:
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


def test_killed_while_batches_are_claimed_by_copy_each_order_counts_once(
    deployment: Deploy, start: Start, subtests: pytest.Subtests
) -> None:
    """With few repetitions in the feed: after one, claims go row by row for a while."""
    settings = {"profile": "throughput", "batch": {"max_messages": 500}}
    deployed = deployment(handler="reserve_many", settings=settings)
    verifier = deployed.verifier()
    feed = deployed.feed(duplicates=0.00005)
    feed.send(BACKLOG)
    for number in (2, 4):
        with subtests.test(f"SIGKILL after_claim@{number}"):
            doomed = start(deployed, failpoints=f"after_claim=kill@{number}")
            assert doomed.wait() == -signal.SIGKILL, doomed.tail()
    start(deployed)
    report = verifier.assert_exactly_once()
    assert report.records == BACKLOG > report.orders, "without duplicates in the feed this would show less than it says"
