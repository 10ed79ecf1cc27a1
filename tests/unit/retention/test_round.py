from __future__ import annotations

import pytest

from processor.retention.round import FEWEST_PAGES, MOST_PAGES, STEP_SECONDS, next_size, pause


@pytest.mark.parametrize(
    ("pages", "seconds", "following"),
    [
        (10, STEP_SECONDS, 10),
        (10, STEP_SECONDS * 2, 5),
        (10, STEP_SECONDS / 2, 20),
        (10, STEP_SECONDS / 1000, 20),  # no more than twice as many: the next pages may be full
        (1, STEP_SECONDS * 50, FEWEST_PAGES),
        (MOST_PAGES, STEP_SECONDS / 10, MOST_PAGES),
    ],
)
def test_size_of_a_step_follows_its_duration_within_bounds(pages: int, seconds: float, following: int) -> None:
    assert next_size(pages, seconds) == following


@pytest.mark.parametrize(
    ("pace", "behind", "share"), [(100, False, 1.0), (20, False, 0.2), (20, True, 0.05), (100, True, 0.25)]
)
def test_pauses_make_work_the_share_of_the_time_that_was_asked_for(pace: int, behind: bool, share: float) -> None:
    assert 0.02 / (0.02 + pause(0.02, pace, behind=behind)) == pytest.approx(share)
