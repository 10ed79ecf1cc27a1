"""How many failures of a partition are too many to go on."""

from __future__ import annotations

import pytest

from processor.engine.failing.budget import Budget
from tests.unit.engine.given import settings

GOOD, BAD = False, True


def budget(consecutive: int = 1000, percent: int = 100, window: int = 1000) -> Budget:
    failure = {"budget_consecutive": consecutive, "budget_percent": percent, "budget_window": window}
    return Budget(settings(failure=failure).failure)


def outcomes(text: str) -> list[bool]:
    """`x` for a message that failed."""
    return [one == "x" for one in text]


# --- in a row ---


@pytest.mark.parametrize(
    ("counted", "now", "exceeded"),
    [
        ([], "xxx", False),
        ([], "xxxx", True),
        ([], "xxx.xxx", False),
        ([], "xx.xxxx.", True),  # that it ended well later does not count
        ([], "....", False),
        (["xxx"], "", False),
        (["xxx"], ".xxx", False),
        (["xxx"], "x", True),
        (["x", "x", "x"], "x", True),
        (["xxx."], "xxx", False),
        (["xxx.", ""], "xxx", False),
        ([".x", "x"], "xx", True),
        (["xx.x"], "xx", False),
        (["xx.x"], "xxx", True),
    ],
)
def test_more_failures_in_a_row_than_allowed_exceed_the_budget_across_batches(
    counted: list[str], now: str, exceeded: bool
) -> None:
    spent = budget(consecutive=3)
    for batch in counted:
        spent.count(outcomes(batch))
    reason = spent.exceeded(outcomes(now))
    assert reason == ("more than 3 messages in a row failed (failure.budget_consecutive)" if exceeded else None)


# --- of the last ones ---


@pytest.mark.parametrize(
    ("counted", "now", "exceeded"),
    [
        ([], "xxxxxxxxx", False),  # the window is not full yet
        ([], "x.x.x.x.x.", False),  # just half of ten
        ([], "x.x.x.x.xx", True),
        (["x.x.x."], "xxx.", True),
        (["x.x.x."], "x.x.", False),
        (["xxxxxx...."], "....", False),  # the older failures are out of the window by then
        (["xxxxx....."], "x", False),
        (["....xxxxx."], "x", True),
        (["x" * 10, "." * 10], "xxxxx", False),
        (["x" * 10, "." * 10], "xxxxxx", True),
        ([], "x" * 10 + "." * 10, False),  # a batch that is longer than the window counts with its end
    ],
)
def test_larger_share_of_failures_than_allowed_exceeds_the_budget_once_the_window_is_full(
    counted: list[str], now: str, exceeded: bool
) -> None:
    spent = budget(percent=50, window=10)
    for batch in counted:
        spent.count(outcomes(batch))
    reason = spent.exceeded(outcomes(now))
    expected = "more than 50 % of the last 10 messages failed (failure.budget_percent)"
    assert reason == (expected if exceeded else None)


def test_all_may_fail_where_the_share_is_not_limited() -> None:
    assert budget(percent=100, window=10).exceeded([BAD] * 50) is None


def test_outcomes_that_are_asked_about_are_not_counted_yet() -> None:
    """The batch may be rolled back and come again."""
    spent = budget(consecutive=3)
    for _ in range(5):
        assert spent.exceeded([BAD] * 3) is None
    spent.count([BAD] * 3)
    assert spent.exceeded([BAD]) is not None
    assert spent.exceeded([GOOD, BAD]) is None
