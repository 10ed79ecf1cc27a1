"""What must hold: each promise as a ratio of figures of the same run, with its threshold."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from statistics import median

from benchmarks import stats
from benchmarks.distance import NEAR
from benchmarks.growth import ROWS
from benchmarks.peers.catalogue import PEERS
from benchmarks.rebalance import BACKLOG, CHURN, JOIN, KILL, LEAVE, RESTART, SESSIONS
from benchmarks.replay import MEMORY, SLOWER
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


# Subject, reference, the least ratio.
RATIOS = (
    ("batch", "bare", 1.0),
    ("batch-2", "bare", 1.4),
    ("collect", "batch", 0.8),
    ("write", "batch", 0.5),
    ("poison", "write", 0.5),
    ("execute", "bare", 0.08),
    ("batch", "single", 150.0),
)


# The same for rates at two places, or of two subjects at one.
ONE_MS = "1 ms"
DISTANCES = (
    (("write-hot", NEAR), ("write", NEAR), 0.7),
    (("write-hot", ONE_MS), ("write", ONE_MS), 0.7),
    (("read-16", ONE_MS), ("read", ONE_MS), 8.0),
    (("batch", ONE_MS), ("batch", NEAR), 0.8),
)
BATCH_ROUND_TRIPS = 6.0


# With fewer records than these, a subject that decodes ahead has no steady rate, and its ratio means nothing.
ENOUGH = int(stats.DECODED_AHEAD / (1 - stats.STEADY_UNTIL))
STEADY_FROM = {"batch-2": 2 * ENOUGH, **dict.fromkeys(("batch", "collect", "write", "poison"), ENOUGH)}


# Our share of what one connection can do with the statements of one worker.
SHARE = 0.75

# What a replay may take, by figure: memory however long it is, and latency of the service beside it.
REPLAYS = {MEMORY: 300.0, SLOWER: 2.0}

# At most this many milliseconds from send to visible output, for orders that a rebalance holds up.
MOVED_MS = 1000.0
STAYED_MS = 300.0
BEHIND_SESSION_MS = 500.0
RESTARTED_MS = 2000.0
# At most this long without any output.
GAP_MS = 1000.0


def verdicts(results: Results) -> Iterator[Verdict]:
    """Those for which there are measurements."""
    for name, reference, threshold in RATIOS:
        value = stats.ratio(_steady(results, name), _steady(results, reference))
        if value is not None:
            yield Verdict(f"{name} / {reference}", value, AT_LEAST, threshold)
    limit = _better(results.rates("sql-1"), results.rates("pgbench-1"))
    share = stats.ratio(_steady(results, "batch"), limit)
    if share is not None:
        yield Verdict("batch / limit of one connection, by the faster client", share, AT_LEAST, SHARE)
    peers = [name for name in PEERS if results.rates(name)]
    if peers:
        fastest = max(peers, key=lambda name: median(results.rates(name).values()))
        value = stats.ratio(_steady(results, "batch"), results.rates(fastest))
        if value is not None:
            yield Verdict(f"batch / {fastest}, the fastest peer", value, AT_LEAST, 2.0)
    yield from _latency(results)
    yield from _growth(results)
    yield from _rebalances(results)
    yield from _retention(results)
    yield from _replays(results)
    yield from _distances(results)


def _latency(results: Results) -> Iterator[Verdict]:
    for percentile, threshold in (("p50", 1.0), ("p99", 1.2)):
        value = stats.ratio(results.delays("default", percentile), results.delays("bare", percentile))
        if value is not None:
            yield Verdict(f"{percentile} at 500 msg/s: default profile / bare loop", value, AT_MOST, threshold)


def _growth(results: Results) -> Iterator[Verdict]:
    points = results.growth(ROWS).get(10_000_000)
    if points:
        shares = [point.share for point in points]
        yield Verdict("rate at 10 million inbox rows / empty inbox", median(shares), AT_LEAST, 0.85)
    audit = results.audit
    if audit is not None and not audit.wrong:
        yield Verdict("memory of an audit at most", audit.highest_mb, AT_MOST, 500.0, "MB")
    soak = results.soak
    if soak is not None and not soak.wrong:
        yield Verdict("memory: last fifth / second fifth", soak.flatness, AT_MOST, 1.1)
        yield Verdict("memory: last fifth / second fifth", soak.flatness, AT_LEAST, 0.9)
        yield Verdict("memory of the worker at most", soak.highest_mb, AT_MOST, 300.0, "MB")


def _rebalances(results: Results) -> Iterator[Verdict]:
    for of in results.rebalances():
        profile, per_second = of
        who = f"{profile} at {per_second:,} msg/s" if per_second else profile
        wanted: list[tuple[str, Collection[str], str, float]] = [
            ("join and leave, partitions that move", (JOIN, LEAVE), "moved_ms", MOVED_MS),
            ("join and leave, partitions that stay", (JOIN, LEAVE), "stayed_ms", STAYED_MS),
            ("kill, partitions that move", (KILL,), "moved_ms", SESSIONS.get(profile, 0) + BEHIND_SESSION_MS),
            ("kill and restart, partitions that move", (RESTART,), "moved_ms", RESTARTED_MS),
            ("kill, partitions that stay", (KILL, RESTART), "stayed_ms", STAYED_MS),
            ("without any output", (BACKLOG,), "gap_ms", GAP_MS),
        ]
        if profile == CHURN:
            wanted.append(("without any output", (JOIN, LEAVE), "gap_ms", GAP_MS))
        for text, events, what, threshold in wanted:
            value = results.worst(of, events, what)
            if value is not None:
                yield Verdict(f"{who}: {text}", value, AT_MOST, threshold, "ms")
        if not any(stall.wrong for stall in results.stalls if (stall.profile, stall.per_second) == of):
            yield Verdict(f"{who}: noise", len(results.noise(of)), AT_MOST, 0.0, "lines")


def _retention(results: Results) -> Iterator[Verdict]:
    one = results.retention
    if one is None or one.wrong:
        return
    if one.with_hand and one.without_hand:
        yield Verdict("rate beside retention / without, same run", one.share, AT_LEAST, 0.95)
        yield Verdict("longest wait of the service for retention", one.longest_wait_ms, AT_MOST, 100.0, "ms")
        yield Verdict("longest step of retention", one.longest_step_ms, AT_MOST, 100.0, "ms")
        yield Verdict("expired rows deleted beside the load", one.deleted / one.rows, AT_LEAST, 1.0)
    if one.cycles:
        yield Verdict("inbox and its index: last cycle / fourth", one.growth, AT_MOST, 1.1)


def _replays(results: Results) -> Iterator[Verdict]:
    for figure in results.replays:
        if figure.name in REPLAYS and figure.value is not None and not figure.wrong:
            yield Verdict(figure.name, figure.value, AT_MOST, REPLAYS[figure.name], figure.unit)


def _distances(results: Results) -> Iterator[Verdict]:
    for one, reference, threshold in DISTANCES:
        value = stats.ratio(results.away(*one), results.away(*reference))
        if value is not None:
            yield Verdict(f"{', '.join(one)} / {', '.join(reference)}", value, AT_LEAST, threshold)
    trips = [sum(one.round_trips.values()) for one in results.distances if one.subject == "batch" and not one.wrong]
    if trips:
        yield Verdict("batch: round trips per batch", max(trips), AT_MOST, BATCH_ROUND_TRIPS, "")


def _steady(results: Results, name: str) -> dict[int, float]:
    """Rates of a subject, if its runs were long enough."""
    enough = STEADY_FROM.get(name, 0)
    return results.rates(name) if all(run.records >= enough for run in results.runs if run.subject == name) else {}


def _better(one: dict[int, float], other: dict[int, float]) -> dict[int, float]:
    return {turn: max(one[turn], other[turn]) for turn in one.keys() & other.keys()}
