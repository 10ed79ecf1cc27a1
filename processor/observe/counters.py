"""Counts what a process has done since it started."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from processor.observe.events import BatchCommitted, Event, MessageRetried, Progress


@dataclass(slots=True)
class Counters:
    """A listener that counts events; the numbers never decrease."""

    records: int = 0
    completed: int = 0
    duplicates: int = 0
    failed: int = 0
    parked: int = 0
    retried: int = 0
    collisions: int = 0
    outputs: int = 0
    batches: int = 0
    round_trips: Counter[str] = field(default_factory=Counter)

    def __call__(self, event: Event) -> None:
        match event:
            case BatchCommitted():
                self.batches += 1
                self.records += event.records
                self.completed += event.completed
                self.duplicates += event.duplicates
                self.failed += event.failed
                self.parked += event.parked
                self.collisions += event.collisions
                self.outputs += event.outputs
                self.round_trips.update(event.round_trips)
            case MessageRetried():
                self.retried += 1

    def progress(self) -> Progress:
        return Progress(
            self.records,
            self.completed,
            self.duplicates,
            self.failed,
            self.parked,
            self.retried,
            self.collisions,
            self.outputs,
            self.batches,
            dict(self.round_trips),
        )
