"""The arithmetic, apart from everything that is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

# The part of a run that is measured. Before it all warm up and buffers fill; behind it what was read and decoded
# ahead is used up, and whoever reads ahead most would have the least left to do.
WARM_UP = 0.1
STEADY_UNTIL = 0.75
# Records that a worker of the processor decodes ahead. Behind the measured part there have to be more left.
DECODED_AHEAD = 40_000


def steady_rate(appended_ms: Sequence[int]) -> float:
    """Outputs per second by their append times, as long as there is plenty to do."""
    times = sorted(appended_ms)
    first, last = int(len(times) * WARM_UP), int(len(times) * STEADY_UNTIL)
    seconds = (times[last] - times[first]) / 1000
    if seconds <= 0:
        raise ValueError("all outputs carry the same time: too few records for a rate")
    return (last - first) / seconds


def ratio(rates: Mapping[int, float], reference: Mapping[int, float]) -> float | None:
    """The median of the ratios of each repetition that has both; None if there is none."""
    shared = [rates[turn] / reference[turn] for turn in rates.keys() & reference.keys()]
    return median(shared) if shared else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that is not exceeded by so many percent of all (nearest rank)."""
    if not values:
        raise ValueError("no values")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def flatness(samples: Sequence[float]) -> float:
    """The last fifth against the second, by medians: 1.0 is flat. The first fifth is warm-up."""
    fifth = len(samples) // 5
    if fifth == 0:
        raise ValueError("too few samples")
    return median(samples[-fifth:]) / median(samples[fifth : 2 * fifth])
