"""Workers that keep ending are started again ever more slowly, for as long as it takes."""

from __future__ import annotations

import pytest

from processor.service.supervisor import FIRST_DELAY_SECONDS, LONGEST_DELAY_SECONDS, restart_delay


@pytest.mark.parametrize(
    ("failures", "delay"),
    [
        (0, 0.0),
        (1, FIRST_DELAY_SECONDS),
        (2, 2 * FIRST_DELAY_SECONDS),
        (3, 4 * FIRST_DELAY_SECONDS),
        (100, LONGEST_DELAY_SECONDS),
        (100_000, LONGEST_DELAY_SECONDS),  # a night of them: the power of two would be no float any more
    ],
)
def test_restart_is_delayed_longer_after_each_failure_up_to_a_bound(failures: int, delay: float) -> None:
    assert restart_delay(failures) == delay
