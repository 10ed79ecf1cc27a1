from __future__ import annotations

import pytest

from processor.cli import progress


def test_beside_text_there_is_a_line_for_each_tenth_and_one_for_the_waiting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with progress.display("sent", quiet=False) as shown:
        shown.begin(100)
        for number in range(5, 101, 5):
            shown.done(number, 100)
        shown.waiting("waiting for 2 messages")
        shown.waiting("waiting for 1 message")
    lines = capsys.readouterr().err.splitlines()
    assert lines == [*(f"sent {number} of 100" for number in range(10, 101, 10)), "waiting for 2 messages"]


def test_beside_json_there_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.display("sent", quiet=True) as shown:
        shown.begin(1)
        shown.done(1, 1)
        shown.waiting("waiting")
    assert capsys.readouterr() == ("", "")
