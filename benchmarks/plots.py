"""Runs draw.py in the environment that has matplotlib; the project's own does not."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

from benchmarks.errors import BenchError
from benchmarks.processes import ROOT

PYTHON = ROOT / ".bench" / "bin" / "python"
SCRIPT = Path(__file__).parent / "draw.py"
SECONDS = 120.0


def draw(results: Sequence[Path], to: Path) -> None:
    if not PYTHON.exists():
        raise BenchError("pictures need matplotlib in an environment of its own: `make bench-env`")
    to.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([PYTHON, SCRIPT, to, *results], capture_output=True, text=True, timeout=SECONDS, check=False)
    if done.returncode != 0:
        raise BenchError(f"drawing failed: {' '.join(done.stderr.split())[-300:]}")
