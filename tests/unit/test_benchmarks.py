"""The harness's arithmetic and its judge: what is lost, doubled or wrong is seen, and no figure hides it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import check, cpu, pgbench, rebalance, recording, sql, stats, verdicts, workload
from benchmarks.growth import ROWS, Point
from benchmarks.job import Job
from benchmarks.latency import Latency
from benchmarks.measure import Run
from benchmarks.rebalance import PROFILES, STATIC, Event, Profile, Stall
from benchmarks.results import Ceiling, Results
from benchmarks.soak import Soak
from benchmarks.subjects import SUBJECTS, Processor
from benchmarks.workload import Order
from processor.settings.load import load

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
    found.stalls = [Stall("classic", 1500, "join", 900.0, 100.0, 50.0, 40.0, ["A: not_ready"])]
    found.soak = Soak(1, 1, [1.0])
    found.write(tmp_path / "results.json")
    assert Results.read(tmp_path / "results.json") == found


def test_results_from_before_rebalances_were_measured_can_be_read(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    results(bare=100.0).write(path)
    fields = json.loads(path.read_text())
    del fields["stalls"]
    path.write_text(json.dumps(fields))
    assert Results.read(path).stalls == []


def test_ratios_are_never_taken_between_sessions() -> None:
    found = Results.together([results(bare=100.0, batch=100.0), results(bare=10.0, batch=5.0, single=1.0)])
    assert sorted(found.rates("batch").values()) == [5.0, 100.0]
    assert [verdict.value for verdict in verdicts.verdicts(found)] == [0.75, 5.0]


SENT = {"o-0": 8.0, "o-1": 9.5, "o-2": 10.0, "o-3": 11.0, "o-4": 11.5, "o-5": 13.0}
SEEN = {"o-0": 8.9, "o-1": 9.6, "o-2": 11.25, "o-3": 11.25, "o-4": 11.75, "o-5": 20.0}
PLACES = {"o-0": 0, "o-1": 1, "o-2": 0, "o-3": 1, "o-4": 0, "o-5": 1}


def test_a_stall_is_the_longest_delay_of_what_was_sent_around_the_event() -> None:
    event = Event("join", 10.0, 12.0, {0}, ["A: not_ready"])
    stall = rebalance.stall_of("classic", 1500, event, SENT, SEEN, PLACES)
    assert (stall.moved_ms, stall.stayed_ms, stall.p99_ms) == (1250.0, 250.0, 1250.0)
    assert stall.gap_ms == pytest.approx(1650.0)  # o-1 is seen at 9.6, the next at 11.25
    assert stall.noise == ["A: not_ready"]


def test_without_an_event_nothing_moved_and_nothing_before_it_counts() -> None:
    stall = rebalance.stall_of("classic", 1500, Event("calm", 10.5, 12.0), SENT, SEEN, PLACES)
    assert (stall.moved_ms, stall.stayed_ms, stall.gap_ms) == (None, 250.0, 500.0)


def test_what_members_say_is_read_from_their_logs(tmp_path: Path) -> None:
    log = tmp_path / "member.log"
    log.write_text(
        '{"event": "partition_ready", "partition": "orders[x][3]", "level": "info"}\n'
        "Traceback (most recent call last):\n"
        '{"event": "partition_ready", "partition": "orders[x][12]", "level": "warning"}\n'
        '{"event": "starting_over", "reason": "fenced", "level": "warning"}\n'
        '{"event": "partition_halted", "level": "error"}\n'
        '{"event": "partition_re'
    )
    lines = rebalance.said(log)
    assert rebalance.ready_in(lines) == {3, 12}
    assert rebalance.noise_in(lines, "A") == ["A: starting_over fenced", "A: partition_halted"]


def test_rebalances_have_their_verdicts() -> None:
    found = Results()
    found.stalls = [
        Stall("consumer", 1500, "calm", None, 400.0, 90.0),
        Stall("consumer", 1500, "join", 900.0, 300.0),
        Stall("consumer", 1500, "leave", 1001.0, 100.0),
        Stall("consumer", 1500, "kill", 6500.0, 301.0, noise=["A: not_ready"]),
        Stall("static", 1500, "kill, restarted", 2000.0, 10.0),
        Stall("backlog", 0, "backlog", gap_ms=1001.0),
        Stall("churn", 500, "join", 10.0, 10.0, gap_ms=1001.0),
        Stall("classic", 1500, "join", 9000.0, 9000.0, wrong=["no row for o-1"]),
    ]
    judged = [(verdict.text, verdict.ok) for verdict in verdicts.verdicts(found)]
    assert judged == [
        ("consumer at 1,500 msg/s: join and leave, partitions that move", False),
        ("consumer at 1,500 msg/s: join and leave, partitions that stay", True),
        ("consumer at 1,500 msg/s: kill, partitions that move", True),
        ("consumer at 1,500 msg/s: kill, partitions that stay", False),
        ("consumer at 1,500 msg/s: noise", False),
        ("static at 1,500 msg/s: kill and restart, partitions that move", True),
        ("static at 1,500 msg/s: kill, partitions that stay", True),
        ("static at 1,500 msg/s: noise", True),
        ("backlog: without any output", False),
        ("backlog: noise", True),
        ("churn at 500 msg/s: join and leave, partitions that move", True),
        ("churn at 500 msg/s: join and leave, partitions that stay", True),
        ("churn at 500 msg/s: without any output", False),
        ("churn at 500 msg/s: noise", True),
    ]
    assert found.wrong == ["WRONG rebalance, classic at 1500 msg/s: no row for o-1"]


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
    settings = load(path, environ={})
    assert settings.consumer == "bench"
    assert settings.batch.max_messages == 2000


@pytest.mark.parametrize("profile", [profile for profile in PROFILES if profile is not STATIC])
def test_the_processor_accepts_the_profiles_of_rebalances(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    job = Job("localhost:9092", "postgresql://localhost/bench", "orders", "out", "bench")
    path.write_text(profile.subject().config(job))
    settings = load(path, environ={})
    assert settings.kafka.group_protocol == profile.kafka["group_protocol"]


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
