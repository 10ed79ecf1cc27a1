"""The peers of `benchmarks/peers/` as subjects: their scripts, run by the Python of their own environment."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from benchmarks.errors import BenchError
from benchmarks.job import Job
from benchmarks.peers.catalogue import PEERS
from benchmarks.processes import Command
from benchmarks.subjects import Subject


@dataclass(frozen=True, slots=True)
class Rival(Subject):
    script: Path = Path()
    most: int = 0

    def records(self, of: int) -> int:
        return min(of, self.most)

    def prepare(self, job: Job, folder: Path) -> Command:
        return Command([self.python, str(self.script)], job.variables(folder))


def rivals(python: Path) -> list[Rival]:
    # Not resolved: a virtual environment is found by the path of its own link.
    interpreter = python.absolute()
    if not interpreter.exists():
        raise BenchError(f"{python} is missing: `make bench-peers` builds the peers' environment")
    return [
        Rival(name, peer.title, "", python=str(interpreter), script=peer.script, most=peer.records)
        for name, peer in PEERS.items()
    ]
