"""Statements of a recorded run, grouped by transaction."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

from benchmarks import recording, sql


def test_a_recording_is_what_came_before_the_batches_and_each_batch(tmp_path: Path) -> None:
    control, work = 1, 2
    entries: list[tuple[int, str, tuple[Any, ...]]] = [
        (control, "SELECT lock($1)", (7,)),
        (work, "BEGIN;", ()),
        (work, sql.INSERT_MANY, (["o-1", "o-2"], ["s", "s"], [1, 1])),
        (control, "SELECT 1", ()),
        (work, "COMMIT;", ()),
        (work, "BEGIN;", ()),
        (work, sql.INSERT_MANY, (["o-3"], ["s"], [1])),
        (work, "ROLLBACK;", ()),
        (work, "BEGIN;", ()),
        (work, sql.INSERT_MANY, (["o-3"], ["s"], [1])),
        (work, "COMMIT;", ()),
        (control, "UPDATE ledger", ()),
    ]
    path = tmp_path / "1.pickle"
    with path.open("wb") as file:
        for entry in entries:
            pickle.dump(entry, file)
    found = recording.read(path)
    assert found.setup == [("SELECT lock($1)", (7,)), ("SELECT 1", ())]
    assert [transaction.records for transaction in found.transactions] == [2, 1]
    assert [len(transaction.statements) for transaction in found.transactions] == [3, 3]
