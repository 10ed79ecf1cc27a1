"""How much processor time a tree of processes has used, ended members included."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import psutil


@dataclass(frozen=True, slots=True)
class Sample:
    at_ms: float  # by the wall clock, as Kafka's append times
    seconds: dict[str, float]


def used(roots: Iterable[int]) -> float:
    """Seconds used by the processes and their descendants; a process that has ended counts through its parent."""
    return sum(_used(member) for root in roots for member in _family(root))


def per_record(first: Sample, last: Sample, appended_ms: Iterable[int]) -> dict[str, float]:
    """Microseconds for each output appended between two samples."""
    records = sum(first.at_ms <= at < last.at_ms for at in appended_ms)
    if not records:
        return {}
    return {name: (last.seconds[name] - first.seconds[name]) / records * 1e6 for name in first.seconds}


def sample(at_ms: float, roots: Mapping[str, Iterable[int]]) -> Sample:
    return Sample(at_ms, {name: used(pids) for name, pids in roots.items()})


def _family(root: int) -> list[psutil.Process]:
    try:
        process = psutil.Process(root)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _used(process: psutil.Process) -> float:
    try:
        times = process.cpu_times()
    except psutil.NoSuchProcess:
        return 0.0
    return float(times.user + times.system + times.children_user + times.children_system)
