"""Everything that was measured, as it is written to a file and read back for pictures."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.measure import Run


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

    @property
    def wrong(self) -> list[Run]:
        return [run for run in self.runs if run.wrong]

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

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def read(cls, path: Path) -> Results:
        fields = json.loads(path.read_text())
        fields["runs"] = [Run(**run) for run in fields["runs"]]
        fields["ceilings"] = [Ceiling(**ceiling) for ceiling in fields["ceilings"]]
        return cls(**fields)
