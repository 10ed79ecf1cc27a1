"""SIGKILL at every step of the protocol, while work flows: nothing is lost, nothing is doubled."""

from __future__ import annotations

import signal

import pytest

from processor import failpoints
from tests.conftest import Deploy, Start
from tests.support.deployments import Deployment

# Which pass of the point kills. A first pass of the Kafka steps is often the recovery itself, which then dies too.
SECOND_KILLS = {"after_claim": 1, "after_postgres_commit": 1, "after_produce": 1, "after_offsets": 1}
# Effects: test_effects. Portions: below. After an operator's move: test_rewind.
ELSEWHERE = (
    *("after_intent", "after_effect"),
    *("after_portion", "after_reposition"),
    *("before_forgetting", "after_forgetting"),
)
POINTS = [point for point in failpoints.POINTS if point not in ELSEWHERE]
KILLS = [(point, 3 if index % 2 else 2) for index, point in enumerate(POINTS)]
KILLS += list(SECOND_KILLS.items())
# Every process here dies, whatever it is at: nobody is to be blamed for that.
BLAME_NOBODY = {"failure": {"quarantine_after": 100}}


# Those of a batch, each where there is something to be lost of handlers that run side by side.
KILLS_OF_MANY = [
    ("after_prepare", 2),
    ("after_handlers", 4),
    ("before_postgres_commit", 3),
    ("after_postgres_commit", 3),
]


@pytest.mark.parametrize("handler", ["reserve"])
@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_killed_at_every_step_and_restarted_each_order_counts_once(
    protocol: str, handler: str, deployment: Deploy, start: Start, subtests: pytest.Subtests
) -> None:
    _kill_again_and_again(deployment(protocol=protocol, handler=handler, settings=BLAME_NOBODY), KILLS, start, subtests)


def test_killed_with_handlers_that_read_side_by_side_each_order_counts_once(
    deployment: Deploy, start: Start, subtests: pytest.Subtests
) -> None:
    settings = BLAME_NOBODY | {"concurrency": 16}
    deployed = deployment(handler="look_and_reserve", settings=settings)
    _kill_again_and_again(deployed, KILLS_OF_MANY, start, subtests)


def _kill_again_and_again(
    deployed: Deployment, kills: list[tuple[str, int]], start: Start, subtests: pytest.Subtests
) -> None:
    """Each process repairs what its predecessor left and is killed itself, at the next point.

    The judge looks after each kill: a fault found then is of the recovery from the kill before, or of this one.
    """
    feed = deployed.feed()
    feed.send(300)
    before = "a clean start"
    with feed.flowing(rate=100):
        for point, number in kills:
            with subtests.test(f"{before}, then SIGKILL {point}@{number}"):
                doomed = start(deployed, failpoints=f"{point}=kill@{number}")
                assert doomed.wait() == -signal.SIGKILL, doomed.tail()
                _assert_right_so_far(deployed, f"after {before}, then SIGKILL at {point}")
            before = f"SIGKILL {point}@{number}"
        survivor = start(deployed)
        survivor.wait_for_partitions(deployed.partitions)
    report = deployed.verifier().assert_exactly_once()
    assert report.records > report.orders, "without duplicates in the feed this would show less than it says"


def test_killed_between_portions_of_what_was_stored_the_rest_is_sent_and_nothing_twice(
    deployment: Deploy, start: Start
) -> None:
    deployed = deployment(partitions=1, settings={"batch": {"max_bytes": 4000}})
    deployed.feed().send(300)
    for point in ("after_postgres_commit", "after_portion", "after_portion"):
        doomed = start(deployed, failpoints=f"{point}=kill@{3 if point == 'after_postgres_commit' else 1}")
        assert doomed.wait() == -signal.SIGKILL, doomed.tail()
    start(deployed).wait_for("stored_outputs_sent")
    deployed.verifier().assert_exactly_once()


def _assert_right_so_far(deployed: Deployment, when: str) -> None:
    report = deployed.verifier().judge()
    assert not report.faults, f"{when}: {report}"
