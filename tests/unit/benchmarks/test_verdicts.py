"""Which figures meet their thresholds, and which have none."""

from __future__ import annotations

import pytest

from benchmarks import verdicts
from benchmarks.distance import Distant
from benchmarks.growth import ROWS, Point
from benchmarks.latency import Latency
from benchmarks.rebalance import Stall
from benchmarks.replay import MEMORY, SLOWER, Figure
from benchmarks.results import Ceiling, Results
from benchmarks.retention import Cycle, Retention
from benchmarks.soak import Soak
from tests.unit.benchmarks.figures import results


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


def test_retention_is_judged_by_neighbouring_stretches_by_its_waits_and_by_sizes() -> None:
    cycles = [Cycle(number, 10, heap, 100) for number, heap in enumerate((100, 200, 300, 300, 350), 1)]
    one = Retention(2000, 2000, [90.0, 99.0, 96.0], [100.0, 100.0, 100.0], 40.0, 30.0, 9, cycles)
    found = {verdict.text: verdict for verdict in verdicts.verdicts(Results(retention=one))}
    assert found["rate beside retention / without, same run"].value == 0.96
    assert found["longest wait of the service for retention"].value == 40.0
    assert found["inbox and its index: last cycle / fourth"].value == 450 / 400
    assert [verdict.ok for verdict in found.values()] == [True, True, True, True, False]
    one.wrong = ["lost"]
    assert list(verdicts.verdicts(Results(retention=one))) == []


def test_replays_are_judged_by_their_memory_and_by_what_they_cost_the_service() -> None:
    found = Results()
    found.replays = [
        Figure("replay of what is done", 100.0, "records/s"),
        Figure(MEMORY, 301.0, "MB"),
        Figure(SLOWER, 2.0, "×"),
        Figure(SLOWER, 1.0, "×", ["99 of 100 skipped"]),
    ]
    judged = [(verdict.text, verdict.unit, verdict.ok) for verdict in verdicts.verdicts(found)]
    assert judged == [(MEMORY, "MB", False), (SLOWER, "×", True)]


def test_handler_forms_have_their_verdicts_near_and_far() -> None:
    def runs(subject: str, near: float, far: float | None, trips: int = 0) -> list[Distant]:
        by_purpose = {"claim": trips} if trips else {}
        return [
            Distant(subject, "near", 0, 1000, near, 0.1, 100, by_purpose),
            Distant(subject, "1 ms", 0, 1000, far, 1.2, 100, by_purpose, [] if far else ["no row for o-1"]),
        ]

    found = Results()
    found.distances = [
        *runs("batch", 100.0, 79.0, trips=7),
        *runs("write", 50.0, 40.0),
        *runs("write-hot", 35.0, 27.0),
        *runs("read", 8.0, 1.0),
        *runs("read-16", 9.0, None),
    ]
    judged = [(verdict.text, verdict.ok) for verdict in verdicts.verdicts(found)]
    assert judged == [
        ("write-hot, near / write, near", True),
        ("write-hot, 1 ms / write, 1 ms", False),
        ("batch, 1 ms / batch, near", False),
        ("batch: round trips per batch", False),
    ]
    assert found.wrong == ["WRONG read-16, 1 ms, repetition 1: no row for o-1"]
