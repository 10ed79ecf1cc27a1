"""What is written to a file, and what is read back."""

from __future__ import annotations

from pathlib import Path

from benchmarks import verdicts
from benchmarks.against import Comparison
from benchmarks.distance import Distant
from benchmarks.growth import ROWS, Point
from benchmarks.latency import Latency
from benchmarks.rebalance import Stall
from benchmarks.results import Ceiling, Results
from benchmarks.soak import Soak
from tests.unit.benchmarks.figures import results


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    found = results(bare=100.0, batch=None)
    found.ceilings = [Ceiling("sql-1", "one connection", 0, 9.0)]
    found.latencies = [Latency("bare", 0, 1, 20.0, 40.0)]
    found.points = [Point(ROWS, 1, 0, 1.0, 1.0)]
    found.stalls = [Stall("classic", 1500, "join", 900.0, 100.0, 50.0, 40.0, ["A: not_ready"])]
    found.comparisons = [Comparison("main", "batch", "msg/s", 0, 2.0, 1.0)]
    found.distances = [Distant("batch", "1 ms", 0, 1000, 9.0, 1.1, 100, {"begin": 1, "claim": 2})]
    found.soak = Soak(1, 1, [1.0])
    found.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == found


def test_ratios_are_never_taken_between_sessions() -> None:
    found = Results.together([results(bare=100.0, batch=100.0), results(bare=10.0, batch=5.0, single=1.0)])
    assert sorted(found.rates("batch").values()) == [5.0, 100.0]
    assert [verdict.value for verdict in verdicts.verdicts(found)] == [0.75, 5.0]
