"""The arithmetic, apart from everything that is measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

# The part of a run that is measured. Before it, everything warms up and buffers fill; after it, records that were read
# and decoded ahead are used up, and the subject that reads furthest ahead would have the least left to do.
WARM_UP = 0.1
STEADY_UNTIL = 0.75
# Records that a worker of the processor decodes ahead. More than these must be left after the measured part.
DECODED_AHEAD = 40_000


def steady_rate(appended_ms: Sequence[int]) -> float:
    """Outputs per second by their append times, over the measured part of the run."""
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
    """The smallest value that at least this percentage of all values does not exceed (nearest rank)."""
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
