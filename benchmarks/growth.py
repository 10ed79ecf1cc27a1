"""Throughput as things grow: rows in the inbox, partitions, bytes per message. Each point beside a base run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.filling import filled
from benchmarks.measure import Run, measure
from benchmarks.show import Show
from benchmarks.site import Filled, Site
from benchmarks.subjects import BATCH
from benchmarks.workload import Feed

ROWS = "inbox rows"
PARTITIONS = "partitions"
BYTES = "bytes per message"

INBOX_ROWS = (1_000_000, 10_000_000, 30_000_000)
PARTITION_NUMBERS = (1, 8, 64, 256)
SIZES = (100, 1_000, 10_000, 100_000, 1_000_000)
# A run with large messages is limited by its bytes.
MOST_BYTES = 300_000_000


@dataclass(slots=True)
class Point:
    """One run, and the run on an empty inbox with 4 partitions and small messages right before it."""

    axis: str
    x: int
    repetition: int
    rate: float | None
    base: float | None
    wrong: list[str] = field(default_factory=list)

    @property
    def share(self) -> float:
        """The rate as a share of the base rate; only right runs have one."""
        assert self.rate is not None
        assert self.base is not None
        return self.rate / self.base


class Growth:
    def __init__(self, site: Site, records: int, repeat: int, show: Show) -> None:
        self._site = site
        self._records = records
        self._repeat = repeat
        self._show = show
        self.points: list[Point] = []

    def inbox_rows(self, numbers: Sequence[int] = INBOX_ROWS) -> None:
        for rows in numbers:
            self._show.step(f"filling the inbox with {rows:,} rows")
            with filled(self._site, rows, self._show) as start:
                self._beside_base(ROWS, rows, self._site.feed(self._records), start)

    def partitions(self, numbers: Sequence[int] = PARTITION_NUMBERS) -> None:
        for number in numbers:
            self._beside_base(PARTITIONS, number, self._site.feed(self._records, partitions=number))

    def sizes(self, sizes: Sequence[int] = SIZES) -> None:
        for size in sizes:
            records = min(self._records, MOST_BYTES // size)
            self._beside_base(BYTES, size, self._site.feed(records, size=size))

    def _beside_base(self, axis: str, x: int, feed: Feed, start: Filled | None = None) -> None:
        for repetition in range(self._repeat):
            self._show.step(f"{axis} {x:,}: the base beside it")
            base = self._run(self._site.feed(self._records), repetition)
            self._show.step(f"{axis} {x:,}")
            run = self._run(feed, repetition, start)
            self.points.append(Point(axis, x, repetition, run.rate, base.rate, [*base.wrong, *run.wrong]))
            if run.rate is None or base.rate is None:
                self._show.say(f"{axis} {x:>11,}  WRONG: {'; '.join([*base.wrong, *run.wrong])}")
            else:
                self._show.say(f"{axis} {x:>11,}  {run.rate:>9,.0f} msg/s, {run.rate / base.rate:.2f} × base")

    def _run(self, feed: Feed, repetition: int, start: Filled | None = None) -> Run:
        return measure(self._site, BATCH, feed, repetition, filled=start, tell=self._show.progress)
