"""The statements of a real run, in order: what came before the first batch, and each batch's transaction."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks import sql
from benchmarks.errors import BenchError
from benchmarks.measure import measure
from benchmarks.site import Site
from benchmarks.subjects import Processor
from benchmarks.workload import Feed

FOLDER = "BENCH_RECORDINGS"

# SQL with its arguments; or COPY with the table, options of asyncpg's `copy_to_table`, and the data.
Statement = tuple[str, tuple[Any, ...]]
COPY = "COPY"


@dataclass(slots=True)
class Transaction:
    records: int = 0
    statements: list[Statement] = field(default_factory=list)  # BEGIN and COMMIT included


@dataclass(slots=True)
class Recording:
    """What one worker sent."""

    setup: list[Statement] = field(default_factory=list)
    transactions: list[Transaction] = field(default_factory=list)

    @property
    def records(self) -> int:
        return sum(transaction.records for transaction in self.transactions)


def record(site: Site, feed: Feed, workers: int) -> list[Recording]:
    """Run the processor once over the input; one recording for each worker that got partitions."""
    with TemporaryDirectory(dir=site.folder) as folder:
        return _record(site, feed, workers, Path(folder))


def _record(site: Site, feed: Feed, workers: int, folder: Path) -> list[Recording]:
    subject = Processor(
        f"recorded-{workers}",
        "",
        module="benchmarks.recorder",
        workers=workers,
        environment={FOLDER: str(folder)},
    )
    run = measure(site, subject, feed, 0)
    if run.wrong:
        raise BenchError(f"the run whose statements were to be replayed went wrong: {'; '.join(run.wrong)}")
    found = [recording for recording in map(read, sorted(folder.glob("*.pickle"))) if recording.transactions]
    if sum(recording.records for recording in found) != len(feed):
        raise BenchError("the recorded statements are not those of the whole input")
    return found


def read(path: Path) -> Recording:
    recording = Recording()
    open_: dict[int, Transaction] = {}
    for connection, text, arguments in _entries(path):
        command = text.strip().rstrip(";").upper()
        if command.startswith("BEGIN"):
            open_[connection] = Transaction(statements=[(text, ())])
        elif connection not in open_:
            if not recording.transactions:
                recording.setup.append((text, arguments))
        else:
            transaction = open_[connection]
            transaction.statements.append((text, arguments))
            if text == sql.INSERT_MANY:
                transaction.records += len(arguments[0])
            if command == "COMMIT":
                del open_[connection]
                if transaction.records:
                    recording.transactions.append(transaction)
                elif not recording.transactions:
                    recording.setup += transaction.statements
            elif command == "ROLLBACK":
                del open_[connection]
    return recording


def _entries(path: Path) -> Iterator[tuple[int, str, tuple[Any, ...]]]:
    with path.open("rb") as file:
        while True:
            try:
                yield pickle.load(file)  # noqa: S301 - written by ourselves a moment ago
            except EOFError:
                return
