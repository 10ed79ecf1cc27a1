"""What an audit compares in the end: doubles, gaps, and what explains that a row is missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import pytest

from processor.errors import SetupError
from processor.messages.message import Partition
from processor.operations.verify import spill
from processor.operations.verify.findings import Findings
from processor.operations.verify.questions import FORGOTTEN, WITHOUT_INBOX, Book, Placed, Question
from processor.operations.verify.settle import TOGETHER_MS, Settlement
from processor.operations.verify.spill import BUCKETS, Spill

KEY, OTHER = b"k" * 16, b"K" * 16
IN = Partition("in", 0)
NOW = 1_700_000_000_000


def output(place: int, offset: int, *, key: bytes = KEY, timestamp_ms: int = NOW) -> Placed:
    return Placed(key, place, timestamp_ms, 0, 0, offset)


def lost(offset: int, key: bytes = KEY) -> Question:
    return Question(key.hex(), "lost_row", "in", 0, offset, "m", "why")


def orphan(offset: int, key: bytes = KEY) -> Question:
    return Question(key.hex(), "orphan_output", "out", 0, offset, "o", "why")


class Given:
    def __init__(self, folder: Path) -> None:
        self.book = Book(folder, {})
        self.inputs: Counter[str] = Counter()
        self.outputs: Counter[str] = Counter()

    def settle(
        self,
        below: Mapping[Partition, int] | None = None,
        *,
        origins_complete: bool = True,
        gaps_from_ms: int | None = 0,
    ) -> list[tuple[str, int | None]]:
        self.book.flush()
        findings = Findings(100)
        settlement = Settlement(
            self.book,
            ["out"],
            self.inputs,
            self.outputs,
            findings,
            below=below or {},
            origins_complete=origins_complete,
            gaps_from_ms=gaps_from_ms,
        )
        for number in range(BUCKETS):
            settlement.settle(number)
        return [(finding.kind, finding.offset) for finding in findings.shown]


@pytest.fixture
def given(tmp_path: Path) -> Given:
    return Given(tmp_path)


def test_outputs_of_all_places_once_each_are_right_in_whatever_order_they_came(given: Given) -> None:
    for place in (2, 0, 300, 1, *range(3, 300)):
        given.book.place(output(place, 1000 - place))
    given.book.place(output(0, 7, key=OTHER))
    assert given.settle() == []


def test_each_repetition_is_named_and_the_first_is_not(given: Given) -> None:
    for offset in (9, 3, 5):
        given.book.place(output(0, offset))
    assert given.settle() == [("doubled_output", 5), ("doubled_output", 9)]


def test_a_gap_proves_a_loss_only_where_nothing_can_have_expired(given: Given) -> None:
    given.book.place(output(2**32 - 1, 4))
    assert given.settle() == [("missing_output", 4)]
    assert given.settle(gaps_from_ms=NOW - TOGETHER_MS) == [("missing_output", 4)]
    assert given.settle(gaps_from_ms=NOW - TOGETHER_MS + 1) == []
    assert given.settle(gaps_from_ms=None) == []


def test_messages_without_inbox_may_have_their_outputs_again(given: Given) -> None:
    given.book.settle(KEY, WITHOUT_INBOX)
    for offset in (3, 5):
        given.book.place(output(0, offset))
        given.book.ask(orphan(offset))
    assert given.settle() == []
    assert given.outputs == {"with_origin": 2}


def test_an_output_from_nowhere_is_a_finding_only_if_all_messages_are_known(given: Given) -> None:
    given.book.place(output(0, 3))
    given.book.place(output(0, 5))
    given.book.ask(orphan(3))
    given.book.ask(orphan(5))
    assert given.settle(origins_complete=False) == []
    assert given.outputs == {"origin_unknown": 2}
    assert sorted(given.settle()) == [("doubled_output", 5), ("orphan_output", 3), ("orphan_output", 5)]


def test_rows_that_were_deleted_for_their_age_explain_what_has_none(given: Given) -> None:
    given.book.settle(KEY, FORGOTTEN)
    given.book.ask(lost(500))  # it came again, before the first one's row went
    given.book.ask(orphan(3))
    given.book.ask(lost(8, OTHER))  # forgotten while the audit ran
    given.book.ask(orphan(4, OTHER))
    assert given.settle({IN: 9}, origins_complete=False) == []
    assert (given.inputs, given.outputs) == ({"duplicate": 1, "forgotten": 1}, {"with_origin": 2})


def test_a_row_that_is_missing_without_a_reason_is_a_finding(given: Given) -> None:
    given.book.settle(OTHER, FORGOTTEN)
    given.book.ask(lost(9))
    assert given.settle({IN: 9}) == [("lost_row", 9)]


def test_what_was_written_behind_the_last_checkpoint_is_cut_off(tmp_path: Path) -> None:
    first = Spill(tmp_path, "s")
    first.bucket(b"a").extend(b"kept")
    first.flush()
    sizes = list(first.sizes)
    first.bucket(b"a").extend(b"not kept")
    first.flush()
    again = Spill(tmp_path, "s", sizes)
    number = b"a"[0] % BUCKETS
    assert again.read(number) == b"kept"
    again.bucket(b"a").extend(b", and more")
    again.flush()
    assert again.read(number) == b"kept, and more"
    assert Spill(tmp_path, "s").read(number) == b""  # of another audit
    with pytest.raises(SetupError, match="delete the folder"):
        Spill(tmp_path, "s", sizes)


def test_memory_is_given_to_the_files_when_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "HELD_BYTES", 10)
    held = Spill(tmp_path, "s")
    held.bucket(b"a").extend(b"123456")
    assert not held.full()
    held.bucket(b"b").extend(b"7890")
    assert held.full()
    held.flush()
    assert not held.full()
