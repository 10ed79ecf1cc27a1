"""Outputs keep their identity on every re-send, and come out of the ledger as they went in."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson
import pytest
from pydantic import BaseModel

from processor import Message, Output, outputs
from processor.outputs import Outgoing


class Priced(BaseModel):
    price: Decimal


@dataclass
class Point:
    x: int


def cause(*headers: tuple[str, bytes | None], id_: str = "e1") -> Message[Any]:
    return Message(id_, "T", b"k", {}, headers, "orders", 0, 41, None)


def headers_of(outgoing: Outgoing) -> dict[str, Any]:
    return dict(outgoing.headers)


def test_output_carries_deterministic_id_causation_and_correlation() -> None:
    first = outputs.encode(Output("out", {"a": 1}, type="Done"), cause(), 0, "inventory")
    again = outputs.encode(Output("out", {"a": 1}, type="Done"), cause(), 0, "inventory")
    assert first == again
    found = headers_of(first)
    assert found["causation-id"] == b"e1"
    assert found["correlation-id"] == b"e1"
    assert found["type"] == b"Done"
    assert first.source_offset == 41


def test_message_id_differs_by_place_cause_and_consumer() -> None:
    ids = {
        outputs.message_id(consumer, cause_id, index)
        for consumer in ("a", "b")
        for cause_id in ("1", "2")
        for index in (0, 1)
    }
    assert len(ids) == 8


def test_message_id_never_changes_between_versions() -> None:
    assert outputs.message_id("inventory", "e1", 0) == "101d68853c23ac4287a75f40f219b871"


def test_correlation_and_traceparent_are_passed_on() -> None:
    traceparent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    found = headers_of(
        outputs.encode(
            Output("out", None), cause(("correlation-id", b"root"), ("traceparent", traceparent)), 0, "inventory"
        )
    )
    assert found["correlation-id"] == b"root"
    assert found["traceparent"] == traceparent


def test_own_headers_win() -> None:
    found = headers_of(
        outputs.encode(Output("out", None, headers={"message-id": "mine", "n": None}), cause(), 0, "inventory")
    )
    assert found["message-id"] == b"mine"
    assert found["n"] is None


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (b"\x00\xff", b"\x00\xff"),
        ("text", b"text"),
        ({"b": 1}, b'{"b":1}'),
        (Point(3), b'{"x":3}'),
        (Priced(price=Decimal("1.10")), b'{"price":"1.10"}'),
        ({"sum": Decimal("0.30")}, b'{"sum":"0.30"}'),
        ([1, 2], b"[1,2]"),
    ],
)
def test_value_is_encoded_by_kind(value: Any, expected: bytes | None) -> None:
    assert outputs.encode(Output("out", value), cause(), 0, "c").value == expected


BAD_KEY: Any = 5
BAD_HEADER: Any = bytearray()


@pytest.mark.parametrize(
    "output",
    [
        Output("", 1),
        Output("out", object()),
        Output("out", 1, key=BAD_KEY),
        Output("out", 1, headers={"h": BAD_HEADER}),
    ],
)
def test_output_that_cannot_be_sent_is_refused(output: Output) -> None:
    with pytest.raises(TypeError):
        outputs.encode(output, cause(), 0, "c")


def test_ledger_blob_gives_back_what_went_in() -> None:
    sent = [
        Outgoing(5, "a", b"k", b"v", [("h", b"x"), ("n", None), ("e", b"")]),
        Outgoing(6, "b", None, None, []),
        Outgoing(7, "a", b"", b"\x00" * 1000, [("ü", b"\xff\xfe")]),
    ]
    assert outputs.unpack(outputs.pack(sent)) == sent


def test_no_outputs_need_no_blob() -> None:
    assert outputs.pack([]) is None
    assert outputs.unpack(None) == []


def test_blob_of_a_later_format_is_refused() -> None:
    head = orjson.dumps({"format": 99, "rows": []})
    with pytest.raises(ValueError, match="format 99"):
        outputs.unpack(len(head).to_bytes(4, "big") + head)
