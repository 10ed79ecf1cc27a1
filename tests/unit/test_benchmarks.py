"""The harness's arithmetic and its judge: what is lost, doubled or wrong is seen, and no figure hides it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check, cpu, pgbench, recording, sql, stats, verdicts, workload
from benchmarks.growth import ROWS, Point
from benchmarks.job import Job
from benchmarks.latency import Latency
from benchmarks.measure import Run
from benchmarks.results import Ceiling, Results
from benchmarks.soak import Soak
from benchmarks.subjects import SUBJECTS, Processor
from benchmarks.workload import Order
from processor import config

ORDERS = {"o-1": Order("sku-1", 2), "o-2": Order("sku-1", 3), "o-3": Order("sku-2", 1)}
STOCK = {"sku-1": 5, "sku-2": 1}

Pairs = list[check.Pair]


def pairs() -> Pairs:
    return list(ORDERS.items())


def test_a_complete_run_is_right() -> None:
    assert check.judge(ORDERS, pairs(), pairs(), STOCK, inbox_rows=3) == []


CHANGES: dict[str, tuple[Callable[[Pairs], object], str]] = {
    "lost": (lambda found: found.pop(), "no {} for o-3"),
    "doubled": (lambda found: found.append(found[0]), "2 {}s for o-1"),
    "wrong": (lambda found: found.__setitem__(1, ("o-2", Order("sku-1", 4))), "{} of o-2 is ('sku-1', 4) instead of"),
    "never ordered": (lambda found: found.append(("o-9", Order("sku-1", 1))), "{} for o-9, which was never ordered"),
}


@pytest.mark.parametrize("what", ["row", "output"])
@pytest.mark.parametrize("case", CHANGES)
def test_what_is_lost_doubled_or_wrong_is_seen(what: str, case: str) -> None:
    change, expected = CHANGES[case]
    rows, outputs = pairs(), pairs()
    change(rows if what == "row" else outputs)
    (problem,) = check.judge(ORDERS, rows, outputs, STOCK)
    assert problem.startswith(expected.format(what))


def test_stock_that_does_not_add_up_is_seen() -> None:
    (problem,) = check.judge(ORDERS, pairs(), pairs(), STOCK | {"sku-2": 2})
    assert problem == "sku-2 has 2 reserved instead of 1"


def test_a_missing_inbox_row_is_seen() -> None:
    assert check.judge(ORDERS, pairs(), pairs(), STOCK, inbox_rows=2) == ["2 inbox rows for 3 records"]


def test_many_problems_are_counted_not_listed() -> None:
    problems = check.judge(ORDERS | {f"x-{n}": Order("sku-3", 0) for n in range(50)}, pairs(), pairs(), STOCK)
    assert "… 50 like this" in problems
    assert len(problems) < 10


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"o-1", b"not json"), (b"o-1", None), (b"o-1", b"[]"), (b"o-2", b'{"order_id":"o-1","sku":"s","quantity":1}')],
)
def test_an_output_that_cannot_be_read_or_has_another_key_was_never_ordered(key: bytes, value: bytes | None) -> None:
    order_id, _ = check.parse_output(key, value)
    assert order_id not in ORDERS


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


def test_processor_time_is_divided_by_what_was_appended_meanwhile() -> None:
    first, last = cpu.Sample(1000.0, {"subject": 1.0}), cpu.Sample(2000.0, {"subject": 3.0})
    assert cpu.per_record(first, last, [999, 1000, 1500, 1999, 2000]) == {"subject": pytest.approx(2e6 / 3)}
    assert cpu.per_record(first, last, []) == {}


def results(records: int = 400_000, **rates: float | None) -> Results:
    found = Results(titles={"batch": "processor"})
    for name, rate in rates.items():
        found.runs.append(Run(name, 0, records, rate, {"subject": 1.0}, [] if rate else ["no row for o-1"]))
    return found


def test_a_wrong_run_has_no_rate_and_no_verdict() -> None:
    found = results(bare=100.0, batch=None)
    assert found.rates("batch") == {}
    assert list(verdicts.verdicts(found)) == []
    assert found.wrong == ["WRONG batch, repetition 1: no row for o-1"]


@pytest.mark.parametrize(("rate", "ok"), [(100.0, True), (99.0, False)])
def test_a_threshold_is_met_or_missed(rate: float, ok: bool) -> None:
    (verdict,) = verdicts.verdicts(results(bare=100.0, batch=rate))
    assert (verdict.text, verdict.threshold, verdict.ok) == ("batch / bare", 1.0, ok)


def test_a_run_that_is_too_short_for_a_steady_rate_has_no_verdict() -> None:
    found = results(records=30_000, bare=100.0, batch=200.0, collect=90.0, execute=9.0)
    assert [verdict.text for verdict in verdicts.verdicts(found)] == ["execute / bare"]


def test_the_limit_is_the_faster_of_both_clients() -> None:
    found = results(batch=75.0)
    found.ceilings = [Ceiling("sql-1", "", 0, 90.0), Ceiling("pgbench-1", "", 0, 100.0)]
    (verdict,) = verdicts.verdicts(found)
    assert (verdict.value, verdict.ok) == (0.75, True)


def test_the_fastest_peer_is_the_one_to_beat() -> None:
    (verdict,) = verdicts.verdicts(results(batch=100.0, quix=60.0, arroyo=20.0))
    assert verdict.text == "batch / quix, the fastest peer"
    assert not verdict.ok


def test_latency_growth_and_memory_have_their_verdicts() -> None:
    found = Results()
    found.latencies = [Latency("bare", 0, 1, 20.0, 40.0), Latency("default", 0, 1, 21.0, 44.0)]
    found.points = [Point(ROWS, 10_000_000, 0, 80.0, 100.0), Point(ROWS, 1_000_000, 0, 10.0, 100.0)]
    found.soak = Soak(1, 1, [100.0] * 10)
    assert [(verdict.value, verdict.ok) for verdict in verdicts.verdicts(found)] == [
        (1.05, False),
        (1.1, True),
        (0.8, False),
        (1.0, True),
        (1.0, True),
        (100.0, True),
    ]


def test_results_are_read_back_as_they_were_written(tmp_path: Path) -> None:
    found = results(bare=100.0, batch=None)
    found.ceilings = [Ceiling("sql-1", "one connection", 0, 9.0)]
    found.latencies = [Latency("bare", 0, 1, 20.0, 40.0)]
    found.points = [Point(ROWS, 1, 0, 1.0, 1.0)]
    found.soak = Soak(1, 1, [1.0])
    found.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == found


def test_ratios_are_never_taken_between_sessions() -> None:
    found = Results.together([results(bare=100.0, batch=100.0), results(bare=10.0, batch=5.0, single=1.0)])
    assert sorted(found.rates("batch").values()) == [5.0, 100.0]
    assert [verdict.value for verdict in verdicts.verdicts(found)] == [0.75, 5.0]


def test_orders_are_the_same_every_time_and_have_the_wanted_size() -> None:
    assert list(workload.orders(50)) == list(workload.orders(50))
    sizes = {len(value) for _, _, value in workload.orders(50, 1000)}
    assert min(sizes) > 980
    assert max(sizes) < 1020
    ids = [order_id for order_id, _, _ in workload.orders(50)]
    assert len(set(ids)) == 50


@pytest.mark.parametrize("subject", [subject for subject in SUBJECTS if isinstance(subject, Processor)])
def test_the_processor_accepts_the_configuration_that_is_written_for_it(subject: Processor, tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(subject.config(Job("localhost:9092", "postgresql://localhost/bench", "orders", "out", "bench")))
    settings = config.load(path, environ={})
    assert settings.consumer == "bench"
    assert settings.batch.max_messages == 2000


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "NULL"),
        (5, "5"),
        (True, "true"),
        ("it's", "'it''s'"),
    ],
)
def test_values_are_written_out_as_postgres_reads_them(value: Any, text: str) -> None:
    assert pgbench.literal(value) == text


def test_a_recording_is_what_came_before_the_batches_and_each_batch(tmp_path: Path) -> None:
    control, work = 1, 2
    entries: list[tuple[int, str, tuple[Any, ...]]] = [
        (control, "SELECT lock($1)", (7,)),
        (work, "BEGIN;", ()),
        (work, sql.INSERT_MANY, (["o-1", "o-2"], ["s", "s"], [1, 1])),
        (control, "SELECT 1", ()),
        (work, "COMMIT;", ()),
        (work, "BEGIN;", ()),
        (work, sql.INSERT_MANY, (["o-3"], ["s"], [1])),
        (work, "ROLLBACK;", ()),
        (work, "BEGIN;", ()),
        (work, sql.INSERT_MANY, (["o-3"], ["s"], [1])),
        (work, "COMMIT;", ()),
        (control, "UPDATE ledger", ()),
    ]
    path = tmp_path / "1.pickle"
    with path.open("wb") as file:
        for entry in entries:
            pickle.dump(entry, file)
    found = recording.read(path)
    assert found.setup == [("SELECT lock($1)", (7,)), ("SELECT 1", ())]
    assert [transaction.records for transaction in found.transactions] == [2, 1]
    assert [len(transaction.statements) for transaction in found.transactions] == [3, 3]
