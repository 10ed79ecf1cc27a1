"""How much of each room of the processor the tests have run: the end of `make test`.

Tests in this process, their workers, and every process of the processor that ended by itself are counted; one that was
killed leaves nothing behind. Lines, not branches: measuring those costs more than it shows.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import coverage
from coverage.exceptions import CoverageException

PACKAGE = "processor"


@dataclass(frozen=True, slots=True)
class Room:
    name: str
    lines: int
    run: int

    def __str__(self) -> str:
        return f"  {self.name:<14} {self.lines:>6,} lines {self.run / self.lines:>6.1%} run by tests"


def rooms(files: Mapping[str, Mapping[str, Any]]) -> list[Room]:
    """One for each folder of the package, one for its own modules, and the total, of a report in coverage's JSON."""
    lines: Counter[str] = Counter()
    run: Counter[str] = Counter()
    for path, file in files.items():
        parts = Path(path).parts
        inside = parts[parts.index(PACKAGE) + 1 :]
        for name in (f"{inside[0]}/" if len(inside) > 1 else PACKAGE, "total"):
            lines[name] += file["summary"]["num_statements"]
            run[name] += file["summary"]["covered_lines"]
    return [Room(name, lines[name], run[name]) for name in sorted(+lines, key=lambda name: (name == "total", name))]


def main() -> int:
    measured = coverage.Coverage()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "report.json"
        try:
            measured.combine()
            measured.save()  # for `coverage report -m` and `coverage html`
            measured.json_report(outfile=str(path))
        except CoverageException as error:
            print(f"no coverage: {error}", file=sys.stderr)
            return 1
        files = json.loads(path.read_text())["files"]
    print("\ncoverage by room:")
    for room in rooms(files):
        print(room)
    return 0


if __name__ == "__main__":
    sys.exit(main())
