from __future__ import annotations

import json

import pytest

from processor.messages import wire
from processor.messages.failure import Failure


def test_headers_come_back_byte_for_byte() -> None:
    headers = [("a", "ü\0".encode()), ("a", b"\xff\0"), ("b", None), ("a", b"")]
    stored = wire.dump_headers(headers)
    assert json.loads(stored) == [["a", "ü\0"], ["a", {"base64": "/wA="}], ["b", None], ["a", ""]]
    assert wire.load_headers(stored) == headers


def test_a_row_without_a_record_has_no_headers() -> None:
    assert wire.load_headers(None) == []


@pytest.mark.parametrize("detail", ["no such sku", "NUL \0", "half a surrogate pair \ud800"])
def test_errors_have_the_names_that_operators_filter_by(detail: str) -> None:
    stored = wire.dump_error(Failure("handler_error", detail, "Traceback", "bug", "KeyError", "23505"))
    assert wire.load_error(stored) == {
        "class": "bug",
        "reason": "handler_error",
        "message": detail.encode(errors="backslashreplace").decode(),
        "exception": "KeyError",
        "sqlstate": "23505",
        "traceback": "Traceback",
    }


def test_a_row_that_never_failed_has_no_error() -> None:
    assert wire.load_error(None) is None
