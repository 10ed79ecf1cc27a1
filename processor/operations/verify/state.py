"""How far an audit is, in a folder, so that one that was interrupted or killed goes on where it was."""

from __future__ import annotations

import fcntl
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import orjson

from processor.errors import SetupError
from processor.operations.verify.findings import Finding, Findings
from processor.operations.verify.plan import Plan, Span
from processor.operations.verify.questions import NAMES

FILE = "audit.json"
LOCK = "lock"


@dataclass(slots=True)
class Progress:
    about: Mapping[str, Any]  # what is audited
    plan: Plan
    findings: Findings
    began_at: float
    inputs: Counter[str] = field(default_factory=Counter)
    outputs: Counter[str] = field(default_factory=Counter)
    buckets: int = 0  # compared so far
    sizes: dict[str, list[int]] = field(default_factory=dict)  # of the files of the book

    @property
    def total(self) -> int:
        """Offsets to read; there may be fewer records."""
        return sum(span.end - span.start for span in self.plan.spans)

    @property
    def done(self) -> int:
        return sum(min(span.position, span.end) - span.start for span in self.plan.spans)


@contextmanager
def folder(given: Path | None) -> Iterator[Path]:
    """The given folder, for us alone; without one, a folder that is gone afterwards."""
    if given is None:
        with TemporaryDirectory(prefix="processor-verify-") as made:
            yield Path(made)
        return
    try:
        given.mkdir(parents=True, exist_ok=True)
        lock = (given / LOCK).open("ab")
    except OSError as error:
        raise SetupError(f"--state {given}: {error.strerror}") from None
    with lock:
        _take(lock, given)
        yield given


def _take(lock: IO[bytes], given: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise SetupError(f"--state {given}: another audit is using it") from None


def load(where: Path, about: Mapping[str, Any]) -> Progress | None:
    """How far an earlier run came; None if there was none."""
    path = where / FILE
    if not path.exists():
        return None
    try:
        kept = orjson.loads(path.read_bytes())
        plan = kept["plan"]
        spans = [Span(**span) for span in plan.pop("spans")]
        findings = [Finding(*finding) for finding in plan.pop("findings")]
        shown = [Finding(*finding) for finding in kept["findings"]["shown"]]
        progress = Progress(
            kept["about"],
            Plan(spans=spans, findings=findings, **plan),
            Findings(kept["findings"]["limit"], Counter(kept["findings"]["counts"]), shown),
            kept["began_at"],
            Counter(kept["inputs"]),
            Counter(kept["outputs"]),
            kept["buckets"],
            {name: kept["sizes"][name] for name in NAMES},
        )
    except (ValueError, KeyError, TypeError):
        raise SetupError(f"{path} is not the state of an audit: delete the folder, or name another") from None
    if progress.about != orjson.loads(_dumped(about)):
        raise SetupError(
            f"--state {where} holds an audit of other records, settings or servers, which was interrupted:"
            " repeat that command to finish it, name another folder, or delete this one"
        )
    return progress


def save(where: Path, progress: Progress) -> None:
    """Replace what was kept before; the files that it names must have been written."""
    new = where / f"{FILE}.new"
    new.write_bytes(_dumped(progress))
    new.replace(where / FILE)


def delete(where: Path) -> None:
    """Of a finished audit nothing stays: the same command begins anew."""
    (where / FILE).unlink(missing_ok=True)


def _dumped(value: Any) -> bytes:
    return orjson.dumps(value, default=list)
