from __future__ import annotations

import json
from datetime import UTC, datetime

import pytest

from processor.cli import output
from processor.cli.arguments import WrongUse
from processor.cli.dlq.show import pretty
from processor.cli.output import Format, Output


def test_what_could_steer_a_terminal_is_shown_instead_of_obeyed() -> None:
    assert output.safe("a\x1b[31m\tb\n") == "a\\x1b[31m\tb\n"
    assert output.bytes_as_text(b"\x1b[31m") == (b"\x1b[31m".hex(), "hex")
    assert output.bytes_as_text("schön".encode()) == ("schön", "text")
    assert output.key_as_cell(None) == "-"
    assert output.key_as_cell(b"\xff") == "0xff"


def test_payload_is_shown_as_json_text_or_hex() -> None:
    assert pretty('{"a":1}', "text") == '{\n  "a": 1\n}'
    assert pretty("plain", "text") == "plain"
    assert pretty("00ff", "hex") == "00ff"
    assert pretty(None, None) == "null"


@pytest.mark.parametrize(
    ("chosen", "as_json", "expected"),
    [
        (Format.TABLE, False, Format.TABLE),
        (Format.TABLE, True, Format.JSON),
        (Format.JSON, True, Format.JSON),
        (Format.JSONL, False, Format.JSONL),
    ],
)
def test_json_is_short_for_one_of_the_formats(chosen: Format, as_json: bool, expected: Format) -> None:
    assert Output(chosen, as_json).format is expected


def test_two_formats_at_once_are_refused() -> None:
    with pytest.raises(WrongUse, match="exclude each other"):
        Output(Format.JSONL, as_json=True)


def test_an_object_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_line({"text": "two\nlines", "at": datetime(2025, 3, 1, tzinfo=UTC)})
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {"text": "two\nlines", "at": "2025-03-01T00:00:00+00:00"}
