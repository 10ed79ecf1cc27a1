"""What must be shown: each promise as a ratio of figures of the same session, with its threshold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks import stats
from benchmarks.results import Results

AT_LEAST = "≥"
AT_MOST = "≤"


@dataclass(frozen=True, slots=True)
class Verdict:
    text: str
    value: float
    relation: str
    threshold: float
    unit: str = "×"

    @property
    def ok(self) -> bool:
        return self.value >= self.threshold if self.relation == AT_LEAST else self.value <= self.threshold


# Who, against whom, at least.
RATIOS = (
    ("batch", "bare", 1.0),
    ("batch-2", "bare", 1.4),
    ("collect", "batch", 0.8),
    ("write", "batch", 0.5),
    ("execute", "bare", 0.08),
    ("batch", "single", 150.0),
)


# Our share of what one connection can do with the statements of one worker.
SHARE = 0.75


def verdicts(results: Results) -> Iterator[Verdict]:
    """Only of what was measured."""
    for name, reference, threshold in RATIOS:
        value = stats.ratio(results.rates(name), results.rates(reference))
        if value is not None:
            yield Verdict(f"{name} / {reference}", value, AT_LEAST, threshold)
    limit = _better(results.rates("sql-1"), results.rates("pgbench-1"))
    share = stats.ratio(results.rates("batch"), limit)
    if share is not None:
        yield Verdict("batch / limit of one connection, whoever is faster at it", share, AT_LEAST, SHARE)


def _better(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    return {turn: max(one[turn], other[turn]) for turn in one.keys() & other.keys()}
