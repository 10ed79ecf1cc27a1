"""Everything that was measured, as it is written to a file and read back for pictures."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.against import Comparison
from benchmarks.audit import Audit
from benchmarks.distance import Distant
from benchmarks.growth import Point
from benchmarks.latency import Latency
from benchmarks.measure import Run
from benchmarks.rebalance import Stall
from benchmarks.replay import Figure
from benchmarks.retention import Cycle, Retention
from benchmarks.soak import Soak

# Larger than any number of repetitions.
SESSION = 1000


@dataclass(slots=True)
class Ceiling:
    """What a server can do with the same statements or records and nothing else around them."""

    name: str
    title: str
    repetition: int
    rate: float


@dataclass(slots=True)
class Results:
    machine: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, dict[str, str]] = field(default_factory=dict)
    titles: dict[str, str] = field(default_factory=dict)
    runs: list[Run] = field(default_factory=list)
    ceilings: list[Ceiling] = field(default_factory=list)
    latencies: list[Latency] = field(default_factory=list)
    points: list[Point] = field(default_factory=list)
    stalls: list[Stall] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)
    replays: list[Figure] = field(default_factory=list)
    distances: list[Distant] = field(default_factory=list)
    soak: Soak | None = None
    retention: Retention | None = None
    audit: Audit | None = None

    @property
    def wrong(self) -> list[str]:
        """Every run that counts for nothing, with the reason."""
        found = [(f"{run.subject}, repetition {run.repetition + 1}", run.wrong) for run in self.runs]
        found += [(f"latency of {one.subject}, repetition {one.repetition + 1}", one.wrong) for one in self.latencies]
        found += [(f"{point.axis} {point.x:,}", point.wrong) for point in self.points]
        found += [(f"rebalance, {stall.profile} at {stall.per_second} msg/s", stall.wrong) for stall in self.stalls]
        found += [(f"{one.subject}, pair {one.pair + 1}", one.wrong) for one in self.comparisons]
        found += [(figure.name, figure.wrong) for figure in self.replays]
        found += [(f"{one.subject}, {one.place}, repetition {one.repetition + 1}", one.wrong) for one in self.distances]
        if self.soak is not None:
            found.append(("soak", self.soak.wrong))
        if self.retention is not None:
            found.append(("retention", self.retention.wrong))
        if self.audit is not None:
            found.append(("audit", self.audit.wrong))
        return [f"WRONG {who}: {'; '.join(reasons)}" for who, reasons in found if reasons]

    def rates(self, name: str) -> dict[int, float]:
        """By repetition, of a subject or a ceiling; wrong runs have none."""
        found = {run.repetition: run.rate for run in self.runs if run.subject == name and run.rate is not None}
        return found or {ceiling.repetition: ceiling.rate for ceiling in self.ceilings if ceiling.name == name}

    def cpu(self, name: str) -> dict[str, list[float]]:
        """Microseconds per record of each right run."""
        found: dict[str, list[float]] = defaultdict(list)
        for run in self.runs:
            if run.subject == name and run.rate is not None:
                for part, value in run.cpu.items():
                    found[part].append(value)
        return found

    def delays(self, name: str, percentile: str) -> dict[int, float]:
        """Milliseconds by repetition."""
        right = [one for one in self.latencies if one.subject == name and not one.wrong]
        return {one.repetition: getattr(one, percentile) for one in right}

    def growth(self, axis: str) -> dict[int, list[Point]]:
        """Right points of one axis, by their x."""
        found: dict[int, list[Point]] = defaultdict(list)
        for point in self.points:
            if point.axis == axis and not point.wrong:
                found[point.x].append(point)
        return found

    def rebalances(self) -> list[tuple[str, int]]:
        """Profile and rate of every run in which members came and went, right or wrong."""
        return list(dict.fromkeys((stall.profile, stall.per_second) for stall in self.stalls))

    def worst(self, of: tuple[str, int], events: Collection[str], what: str) -> float | None:
        """The longest of these milliseconds in right runs of a profile at a rate; None if they were not measured."""
        found = [
            getattr(stall, what)
            for stall in self.stalls
            if (stall.profile, stall.per_second) == of and stall.event in events and not stall.wrong
        ]
        return max((value for value in found if value is not None), default=None)

    def noise(self, of: tuple[str, int]) -> list[str]:
        return [line for stall in self.stalls if (stall.profile, stall.per_second) == of for line in stall.noise]

    def away(self, subject: str, place: str) -> dict[int, float]:
        """Rates by repetition of a subject at a place."""
        right = [one for one in self.distances if (one.subject, one.place) == (subject, place)]
        return {one.repetition: one.rate for one in right if one.rate is not None}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def together(cls, all_: Iterable[Results]) -> Results:
        """Several results of one machine as one. Repetitions stay apart: ratios are taken within each result."""
        first, *others = all_
        for number, other in enumerate(others, 1):
            measured: list[Run | Ceiling | Latency | Point | Distant]
            measured = [*other.runs, *other.ceilings, *other.latencies, *other.points, *other.distances]
            for one in measured:
                one.repetition += number * SESSION
            first.titles |= other.titles
            first.runs += other.runs
            first.ceilings += other.ceilings
            first.latencies += other.latencies
            first.points += other.points
            first.stalls += other.stalls
            first.comparisons += other.comparisons
            first.replays += other.replays
            first.distances += other.distances
            first.soak = other.soak or first.soak
            first.retention = other.retention or first.retention
            first.audit = other.audit or first.audit
        return first

    @classmethod
    def read(cls, path: Path) -> Results:
        fields = json.loads(path.read_text())
        fields["runs"] = [Run(**run) for run in fields["runs"]]
        fields["ceilings"] = [Ceiling(**ceiling) for ceiling in fields["ceilings"]]
        fields["latencies"] = [Latency(**one) for one in fields["latencies"]]
        fields["points"] = [Point(**point) for point in fields["points"]]
        fields["stalls"] = [Stall(**stall) for stall in fields["stalls"]]
        fields["comparisons"] = [Comparison(**one) for one in fields["comparisons"]]
        fields["replays"] = [Figure(**one) for one in fields["replays"]]
        fields["distances"] = [Distant(**one) for one in fields["distances"]]
        fields["soak"] = Soak(**fields["soak"]) if fields["soak"] else None
        if retention := fields.get("retention"):
            retention["cycles"] = [Cycle(**one) for one in retention["cycles"]]
            fields["retention"] = Retention(**retention)
        fields["audit"] = Audit(**fields["audit"]) if fields.get("audit") else None
        return cls(**fields)
