"""Two versions side by side: which runs make a pair, and what is said about all pairs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import against, report
from benchmarks.__main__ import app
from benchmarks.against import COST, DELAY, RATE, Comparison, Revision, Summary
from benchmarks.errors import BenchError
from benchmarks.processes import ROOT
from benchmarks.results import Results
from benchmarks.subjects import BATCH


def rates(*pairs: tuple[float | None, float | None], subject: str = "batch", unit: str = RATE) -> list[Comparison]:
    return [
        Comparison("main", subject, unit, number, this, other, [] if this and other else ["other: no row for o-1"])
        for number, (this, other) in enumerate(pairs)
    ]


def test_ratios_are_taken_within_a_pair() -> None:
    (summary,) = against.summaries(rates((100.0, 50.0), (10.0, 10.0), (30.0, 20.0)))
    assert summary == Summary("main", "batch", RATE, 30.0, 20.0, 1.5, 1.0, 2.0, 3)


def test_a_pair_with_a_wrong_run_counts_for_nothing() -> None:
    (summary,) = against.summaries(rates((100.0, 50.0), (None, 10.0), (10.0, None)))
    assert (summary.ratio, summary.pairs) == (2.0, 1)
    assert against.summaries(rates((None, 10.0))) == []


def test_each_figure_of_each_subject_and_revision_has_its_own_summary() -> None:
    measured = [
        *rates((3.0, 1.0)),
        *rates((4.0, 1.0), unit=COST),
        *rates((5.0, 1.0), subject="collect"),
        *rates((6.0, 1.0), subject="p99 at 500 msg/s", unit=DELAY),
        Comparison("v1", "batch", RATE, 0, 7.0, 1.0),
    ]
    assert [summary.ratio for summary in against.summaries(measured)] == [3.0, 4.0, 5.0, 6.0, 7.0]


def test_the_side_that_runs_first_changes_from_pair_to_pair() -> None:
    order = [side for pair in range(4) for side, _ in against.sides(BATCH, Path("/elsewhere"), pair)]
    assert order == ["this", "other", "other", "this", "this", "other", "other", "this"]


def test_the_other_side_runs_from_its_own_tree() -> None:
    trees = {side: subject.tree for side, subject in against.sides(BATCH, Path("/elsewhere"), 0)}
    assert trees == {"this": ROOT, "other": Path("/elsewhere")}


def test_a_wrong_run_is_reported_and_makes_the_results_wrong() -> None:
    results = Results(comparisons=rates((100.0, 50.0), (None, 10.0)))
    assert results.wrong == ["WRONG batch, pair 2: other: no row for o-1"]
    assert report.as_json(results)["ok"] is False


def test_the_summaries_are_part_of_the_json() -> None:
    (summary,) = json.loads(json.dumps(report.as_json(Results(comparisons=rates((100.0, 50.0))))))["summaries"]
    assert (summary["ratio"], summary["lowest"], summary["highest"], summary["pairs"]) == (2.0, 2.0, 2.0, 1)


def test_the_table_shows_median_lowest_highest_and_the_number_of_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    report.show(Results(comparisons=rates((100.0, 50.0), (10.0, 10.0), (30.0, 20.0))))
    (line,) = [line.split() for line in capsys.readouterr().out.splitlines() if "batch" in line]
    assert line == ["batch", "main", "msg/s", "30", "20", "1.50", "1.00", "2.00", "3"]


@pytest.mark.parametrize(("name", "text"), [("main", "main (1a2b3c4)"), ("1a2b3c4", "1a2b3c4"), ("1a2b", "1a2b3c4")])
def test_a_revision_is_named_as_it_was_asked_for_and_by_its_commit(name: str, text: str) -> None:
    assert str(Revision(name, "1a2b3c4")) == text


@pytest.mark.parametrize("name", ["no-such-branch", "--help", ""])
def test_a_revision_that_does_not_exist_is_one_line(name: str) -> None:
    with pytest.raises(BenchError) as error:
        against.find(name)
    assert "\n" not in str(error.value)


def test_nothing_is_started_for_an_unknown_revision_or_subject() -> None:
    runner = CliRunner()
    unknown = runner.invoke(app, ["against", "no-such-branch"])
    assert (unknown.exit_code, "no-such-branch" in unknown.output) == (1, True)
    assert runner.invoke(app, ["against", "HEAD", "--only", "bare"]).exit_code == 2
