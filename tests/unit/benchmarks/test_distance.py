"""What a usual batch is, by the log of a run."""

from __future__ import annotations

import json

from benchmarks.distance import usual_batch


def test_usual_batch_is_the_one_in_the_middle_of_the_measured_part() -> None:
    first = {"begin": 1, "prepare": 9}
    steady = [{"begin": 1, "writes": number} for number in (5, 1, 2, 3, 90, 4, 2)]
    lines = [{"event": "batch_committed", "records": 10, "round_trips": trips} for trips in (first, *steady)]
    log = "\n".join(["not JSON", json.dumps({"event": "ready"}), *map(json.dumps, [*lines, *lines[:2]])])
    assert usual_batch(log) == (10, {"begin": 1, "writes": 3})
