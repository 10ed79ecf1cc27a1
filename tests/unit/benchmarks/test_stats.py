"""The arithmetic behind rates, ratios and percentiles."""

from __future__ import annotations

import pytest

from benchmarks import stats


def test_neither_the_first_tenth_nor_the_last_quarter_counts() -> None:
    slow_start = [0, *(60_000 + n for n in range(1, 1000))]
    assert stats.steady_rate(slow_start) == pytest.approx(1000, rel=0.01)
    slow_end = [*range(800), *(60_000 + n for n in range(200))]
    assert stats.steady_rate(slow_end) == pytest.approx(1000, rel=0.01)
    with pytest.raises(ValueError, match="too few"):
        stats.steady_rate([5] * 100)


def test_ratios_are_taken_within_a_repetition() -> None:
    fast_then_slow = {0: 100.0, 1: 10.0, 2: 50.0}
    reference = {0: 50.0, 1: 5.0, 2: 25.0}
    assert stats.ratio(fast_then_slow, reference) == 2.0
    assert stats.ratio({0: 30.0, 1: 10.0}, {1: 5.0, 7: 1.0}) == 2.0
    assert stats.ratio({0: 1.0}, {}) is None


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(n) for n in range(1, 101)]
    assert stats.percentile(values, 50) == 50.0
    assert stats.percentile(values, 99) == 99.0
    assert stats.percentile([7.0], 99) == 7.0


def test_growing_memory_is_not_flat() -> None:
    assert stats.flatness([500.0] * 20 + [100.0] * 80) == 1.0
    assert stats.flatness([float(n) for n in range(100, 200)]) > 1.4
