"""This working tree beside another version of the same repository, in pairs of runs on the same servers.

The other version runs from a checkout of its own: its processor, its handlers, its migrations. Only what measures and
judges is ours. Within a pair the two run right behind each other, and the order changes from pair to pair, so that
neither gains from a machine that gets faster or slower.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks import latency, processes
from benchmarks.errors import BenchError
from benchmarks.measure import Run, measure
from benchmarks.processes import ROOT, Command
from benchmarks.show import Show
from benchmarks.site import Site
from benchmarks.subjects import SUBJECTS, Processor

RATE = "msg/s"
COST = "µs/msg"
DELAY = "ms"

# The part of `--records` that each subject gets: some seconds of work each.
SHARES = {"batch": 1.0, "batch-2": 2.0, "objects": 1.0, "collect": 1.0, "write": 0.8, "poison": 0.8, "execute": 0.2}
# The one with poison is measured on request.
USUAL = tuple(name for name in SHARES if name != "poison")
KNOWN = {
    subject.name: replace(subject, share=SHARES[subject.name])
    for subject in SUBJECTS
    if isinstance(subject, Processor) and subject.name in SHARES
}

_WHERE = "import benchmarks, processor; print(processor.__file__); print(benchmarks.__file__)"


@dataclass(frozen=True, slots=True)
class Revision:
    name: str  # as the caller gave it
    commit: str

    def __str__(self) -> str:
        return self.commit if self.commit.startswith(self.name) else f"{self.name} ({self.commit})"


@dataclass(slots=True)
class Comparison:
    """One figure of both versions in one pair of runs."""

    revision: str
    subject: str
    unit: str
    pair: int
    this: float | None
    other: float | None
    wrong: list[str] = field(default_factory=list)

    @property
    def ratio(self) -> float | None:
        return None if self.this is None or self.other is None else self.this / self.other


@dataclass(frozen=True, slots=True)
class Summary:
    """One figure over all pairs whose two runs were right."""

    revision: str
    subject: str
    unit: str
    this: float  # median
    other: float
    ratio: float
    lowest: float
    highest: float
    pairs: int


def find(name: str) -> Revision:
    """The commit that a revision stands for."""
    return Revision(name, _git("rev-parse", "--verify", "--short", "--end-of-options", f"{name}^{{commit}}"))


@contextmanager
def checked_out(revision: Revision, folder: Path) -> Iterator[Path]:
    """A worktree of the other version, removed afterwards."""
    with TemporaryDirectory(dir=folder, prefix=f"{revision.commit}-") as temporary:
        tree = Path(temporary).resolve() / "tree"
        _git("worktree", "add", "--quiet", "--detach", str(tree), revision.commit)
        try:
            _check_imports(tree)
            yield tree
        finally:
            _git("worktree", "remove", "--force", str(tree))


def throughput(
    site: Site, tree: Path, revision: Revision, names: Sequence[str], records: int, pairs: int, show: Show
) -> list[Comparison]:
    """Pairs of runs, subject by subject."""
    found = []
    for name in names:
        subject = KNOWN[name]
        feed = site.feed(subject.records(records), poison_one_in=subject.poison_one_in)
        for pair in range(pairs):
            runs: dict[str, Run] = {}
            for side, of in sides(subject, tree, pair):
                show.step(f"{name}, pair {pair + 1} of {pairs}: {side}")
                runs[side] = measure(site, of, feed, pair, tell=show.progress)
            this, other = runs["this"], runs["other"]
            wrong = _wrong(this.wrong, other.wrong)
            found += [
                Comparison(str(revision), name, RATE, pair, this.rate, other.rate, wrong),
                Comparison(str(revision), name, COST, pair, _cost(this), _cost(other)),
            ]
            show.say(_line(found[-2]))
    return found


def latencies(site: Site, tree: Path, revision: Revision, seconds: float, pairs: int, show: Show) -> list[Comparison]:
    """The default profile at the steady load."""
    found = []
    for pair in range(pairs):
        runs = {}
        for side, of in sides(latency.DEFAULT, tree, pair):
            show.step(f"latency at {latency.PER_SECOND} msg/s, pair {pair + 1} of {pairs}: {side}")
            runs[side] = latency.measure(site, of, pair, seconds)
        this, other = runs["this"], runs["other"]
        wrong = _wrong(this.wrong, other.wrong)
        for name in ("p50", "p99"):
            title = f"{name} at {latency.PER_SECOND} msg/s"
            one = Comparison(str(revision), title, DELAY, pair, None, None, wrong)
            if not wrong:
                one.this, one.other = getattr(this, name), getattr(other, name)
            found.append(one)
            show.say(_line(one))
    return found


def summaries(comparisons: list[Comparison]) -> list[Summary]:
    """Ratios are taken within a pair; their median is not the ratio of the medians."""
    found = []
    for key in dict.fromkeys((each.revision, each.subject, each.unit) for each in comparisons):
        pairs = [
            (each.this, each.other, each.ratio)
            for each in comparisons
            if (each.revision, each.subject, each.unit) == key
            and each.this is not None
            and each.other is not None
            and each.ratio is not None
        ]
        if pairs:
            this, other, ratios = (list(column) for column in zip(*pairs, strict=True))
            figures = (median(this), median(other), median(ratios), min(ratios), max(ratios), len(ratios))
            found.append(Summary(*key, *figures))
    return found


def sides(subject: Processor, tree: Path, pair: int) -> list[tuple[str, Processor]]:
    """Both versions in the order in which they run: this first in every even pair, the other first in every odd one."""
    both = [("this", subject), ("other", replace(subject, tree=tree))]
    return both if pair % 2 == 0 else both[::-1]


def _cost(run: Run) -> float | None:
    """Processor time per record of the processor, Postgres and the broker together."""
    return sum(run.cpu.values()) or None


def _wrong(this: list[str], other: list[str]) -> list[str]:
    return [*(f"this: {reason}" for reason in this), *(f"other: {reason}" for reason in other)]


def _line(one: Comparison) -> str:
    if one.this is None or one.other is None or one.ratio is None:
        return f"{one.subject:<16} WRONG: {'; '.join(one.wrong)}"
    digits = 0 if one.unit == RATE else 1
    return f"{one.subject:<16} {one.this:>9,.{digits}f} beside {one.other:>9,.{digits}f} {one.unit}, {one.ratio:.3f}"


def _check_imports(tree: Path) -> None:
    """The environment has this working tree installed: what runs there must come from there all the same."""
    said = processes.call(Command([sys.executable, "-c", _WHERE], {}, tree))
    strangers = [line for line in said.split() if not Path(line).resolve().is_relative_to(tree)]
    if strangers:
        raise BenchError(f"a process in {tree} imports {', '.join(strangers)}: its version cannot be measured")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BenchError("git is not installed: another version cannot be checked out") from None
    if done.returncode != 0:
        raise BenchError(f"git {arguments[0]} {arguments[-1]}: {done.stderr.strip().splitlines()[-1]}")
    return done.stdout.strip()
