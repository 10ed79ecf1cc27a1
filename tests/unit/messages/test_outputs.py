"""Outputs keep their identity on every re-send, and come out of the ledger as they went in."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum
from math import inf, nan
from typing import Any
from uuid import UUID

import orjson
import pytest
from pydantic import BaseModel

from processor import Message, Output, Outputs
from processor.messages import identity, outputs, stored
from processor.messages.batch import Batch
from processor.messages.outputs import Causes, EncodedOutputs, Outgoing
from processor.messages.record import Record
from tests.support.readings import reading


class Priced(BaseModel):
    price: Decimal


@dataclass
class Point:
    x: int


KEY = identity.inbox_key("inventory")


def cause(*headers: tuple[str, bytes | None], id_: str = "e1") -> Message[Any]:
    return Message(id_, "T", b"k", {}, headers, "orders", 0, 41, None)


def encode(output: Output, of: Message[Any], index: int = 0) -> Outgoing:
    (outgoing,) = outputs.encode_all([output], Causes(Batch.of_rows([record(of)])), [0], [index])
    return outgoing


def record(message: Message[Any]) -> Record:
    return Record(message, KEY(message.id), b"", 0, 0, None, True, None, reading())


def headers_of(outgoing: Outgoing) -> dict[str, Any]:
    return dict(outgoing.headers())


def there_and_back(parcel: EncodedOutputs, key_of: Callable[[str], bytes] = KEY) -> EncodedOutputs:
    """Stored in the ledger, and read from it."""
    blob = stored.pack(parcel)
    assert blob is not None
    return stored.unpack(blob, key_of)


def test_output_carries_deterministic_id_causation_and_correlation() -> None:
    first = encode(Output("out", {"a": 1}, type="Done"), cause())
    again = encode(Output("out", {"a": 1}, type="Done"), cause())
    assert first == again
    found = headers_of(first)
    assert found["message-id"] == outputs.message_id(KEY("e1"), 0).encode()
    assert found["causation-id"] == b"e1"
    assert found["correlation-id"] == b"e1"
    assert found["type"] == b"Done"
    assert first.source_offset == 41


def test_message_id_differs_by_place_cause_and_consumer() -> None:
    ids = {
        outputs.message_id(identity.inbox_key(consumer)(cause_id), index)
        for consumer in ("a", "b")
        for cause_id in ("1", "2")
        for index in (0, 1)
    }
    assert len(ids) == 8


def test_message_id_never_changes_between_versions() -> None:
    assert outputs.message_id(KEY("e1"), 0) == "75b8b97764353866f22f9357dc97abc0-0"


def test_correlation_and_traceparent_are_passed_on() -> None:
    traceparent = b"00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    found = headers_of(encode(Output("out", None), cause(("correlation-id", b"root"), ("traceparent", traceparent))))
    assert found["correlation-id"] == b"root"
    assert found["traceparent"] == traceparent


def test_own_headers_win() -> None:
    found = headers_of(encode(Output("out", None, headers={"message-id": "mine", "n": None}), cause()))
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
    assert encode(Output("out", value), cause()).value == expected


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
        encode(output, cause())


def test_ledger_blob_gives_back_what_went_in() -> None:
    sent = [
        encode(Output("a", b"v", b"k", {"h": b"x", "n": None, "e": b""}), cause(id_="e5")),
        encode(Output("b", None), cause(id_="e6")),
        encode(Output("b", None), cause(id_="e6"), 1),
        encode(Output("a", b"\x00" * 1000, b"", {"ü": b"\xff\xfe"}, type="T"), cause(("traceparent", b"t"), id_="ü~7")),
    ]
    kept = list(there_and_back(EncodedOutputs.of(sent)))
    assert kept == sent
    assert [output.headers() for output in kept] == [output.headers() for output in sent]
    assert [output.size() for output in kept] == [output.size() for output in sent]


def dead_letter(*headers: tuple[str, bytes | None], id_: str = "e7") -> Outgoing:
    return Outgoing(43, "orders.c.dlq", b"k", b"\x00v", id_, outputs.DEAD_LETTER, None, headers)


def test_dead_letter_has_its_own_headers_and_no_others() -> None:
    headers = [("a", b"1"), ("a", None), ("message-id", b"\xff"), ("a", b""), ("dlq-reason", b"r")]
    letter = dead_letter(*headers)
    assert letter.headers() == headers
    assert letter.size() == len(b"k\x00v") + sum(len(name) + len(value or b"") + 10 for name, value in headers)
    assert dead_letter().headers() == []


def test_ledger_blob_gives_back_dead_letters_among_outputs() -> None:
    sent = [
        encode(Output("a", b"v", b"k", {"h": b"x", "n": None}), cause(id_="e5")),
        dead_letter(("a", b"1"), ("a", None), ("ü", b"\xff"), ("a", b"1"), ("e", b"")),
        encode(Output("b", b"w"), cause(id_="e6")),
        dead_letter(("h", b"x"), id_="e8")._replace(key=None, value=None),
        dead_letter(("h", b"x"), id_="e9")._replace(key=b"", value=b""),
        encode(Output("b", b"x"), cause(id_="e6"), 1),
    ]

    def key_of(message_id: str) -> bytes:
        assert message_id in ("e5", "e6"), "a dead letter's id is no concern of this blob"
        return KEY(message_id)

    kept = list(there_and_back(EncodedOutputs.of(sent), key_of))
    assert kept == sent
    assert [output.headers() for output in kept] == [output.headers() for output in sent]


def test_standard_headers_keep_their_order_whatever_an_output_adds() -> None:
    added = encode(Output("out", None, headers={"z": "1", "causation-id": "mine", "a": "2"}, type="T"), cause())
    assert [name for name, _ in added.headers()] == ["message-id", "causation-id", "correlation-id", "type", "z", "a"]
    assert dict(added.headers())["causation-id"] == b"mine"


def test_outputs_encoded_together_are_as_if_each_was_encoded_alone() -> None:
    """What one of them has, its neighbours have not."""
    plain = [Output("out", {"n": n}, f"k{n}") for n in range(3)]
    odd = [
        Output("out", None),
        Output("other", "text", b"\xff", type="Done"),
        Output("out", 1, headers={"mine": "x", "message-id": "own"}),
        Output("out", [Priced(price=Decimal("1.10"))]),
    ]
    causes = [cause(id_=f"e{n}") for n in range(6)] + [cause(("correlation-id", b"root"), id_="e6")]
    for together in (plain, odd, [*plain, *odd], [*odd, *plain]):
        of = causes[-len(together) :]
        places = list(range(len(together)))
        found = list(outputs.encode_all(together, Causes(Batch.of_rows(map(record, of))), places, places))
        alone = [encode(output, cause, place) for output, cause, place in zip(together, of, places, strict=True)]
        assert found == alone
        assert [headers_of(output) for output in found] == [headers_of(output) for output in alone]


def test_values_that_hold_what_stands_between_them_are_encoded_as_they_are_alone() -> None:
    fragment = orjson.Fragment(b'[1,\n,"not even JSON"]')
    values: list[dict[str, Any]] = [{"n": "a,\n,b"}, {"n": 1}, {"n": fragment}, {",\n,": 2}]
    assert outputs._dump_all(values) == list(map(outputs.dump_json, values))
    assert outputs._dump_all(values[:2]) == list(map(outputs.dump_json, values[:2]))
    assert outputs._dump_all(values[3:]) == list(map(outputs.dump_json, values[3:]))


# --- numbers that JSON does not have ---


class Colour(Enum):
    NONE = nan


@dataclass
class Measured:
    level: float


class Rated(BaseModel):
    rate: float


NO_NUMBERS: list[tuple[Any, str]] = [
    (nan, ""),
    ({"total": nan}, " at /total"),
    ({"total": inf, "other": None}, " at /total"),
    ({"lines": [{"price": 1.0}, {"price": -inf}]}, " at /lines/1/price"),
    ({"pair": (None, nan)}, " at /pair/1"),
    ({"some": {nan}}, " at /some/0"),
    (Measured(nan), " at /level"),
    ({"model": Rated(rate=inf)}, " at /model/rate"),
    ({"colour": Colour.NONE}, " at /colour"),
]


@pytest.mark.parametrize(("value", "where"), NO_NUMBERS, ids=repr)
def test_nan_and_infinity_are_refused_wherever_they_hide_instead_of_becoming_null(value: Any, where: str) -> None:
    message = re.escape(f"NaN or infinity{where}: JSON has no such number")
    good = {"total": 1.5, "nothing": None}
    with pytest.raises(ValueError, match=message):
        outputs.dump_json(value)  # as results are encoded
    with pytest.raises(ValueError, match=message):
        encode(Output("out", value), cause())
    causes = Causes(Batch.of_rows([record(cause(id_=f"e{n}")) for n in range(3)]))
    with pytest.raises(ValueError, match=message):
        outputs.encode_all([Output("out", good), Output("out", value), Output("out", good)], causes, range(3), [0] * 3)
    with pytest.raises(ValueError, match=message):
        outputs.encode_each(Outputs("out", [good, good, value]), causes, range(3))


def test_decimals_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(TypeError, match="not JSON serializable"):
        outputs.dump_json({"price": Decimal("NaN")})


def test_nulls_that_are_meant_are_written() -> None:
    values: list[Any] = [
        {"a": None},
        {"text": "null and nan", "n": 1.5},
        {"m": Priced(price=Decimal("1.10")), "x": [None, (None, 1e308)]},
        {"at": datetime(2026, 1, 1, tzinfo=UTC), "id": UUID(int=1), "none": None, "own": orjson.Fragment(b"null")},
    ]
    assert outputs._dump_all(values) == [orjson.dumps(value, default=outputs._plain) for value in values]


# --- one for each, by the column ---


def plain_causes() -> list[Message[Any]]:
    return [cause(id_=f"e{n}") for n in range(4)]


def special_causes() -> list[Message[Any]]:
    """Some with headers that are passed on, some with others, some without."""
    return [
        cause(id_="e0"),
        cause(("correlation-id", b"root"), ("traceparent", b"t-1"), id_="e1"),
        cause(("other", b"x"), id_="e2"),
        cause(("traceparent", None), ("correlation-id", b""), id_="e3"),
    ]


@pytest.mark.parametrize("make", [plain_causes, special_causes])
@pytest.mark.parametrize("type_", [None, "Done"])
@pytest.mark.parametrize("keys", [None, [b"a", b"b", b"", b"\xff"], ["a", "ü", "", "d"], [b"a", None, "c", None]])
@pytest.mark.parametrize(
    "values",
    [
        [{"n": 1}, {"n": 2}, {"sum": Decimal("0.30")}, {}],
        [{"n": 1}, None, "text", b"\x00"],
        [Priced(price=Decimal("1.10")), [1], 5, Point(3)],
    ],
)
def test_outputs_by_the_column_are_as_if_each_was_an_output_of_its_own(
    make: Callable[[], list[Message[Any]]], type_: str | None, keys: Any, values: list[Any]
) -> None:
    of = make()
    expected = [
        encode(Output("out", value, key, type=type_), one)
        for value, key, one in zip(values, keys or [None] * 4, of, strict=True)
    ]
    causes = Causes(Batch.of_rows(map(record, of)))
    for where in (range(4), [0, 1, 2, 3]):
        found = list(outputs.encode_each(Outputs("out", values, keys, type_), causes, where))
        assert found == expected
        assert [output.headers() for output in found] == [output.headers() for output in expected]
        assert [output.size() for output in found] == [output.size() for output in expected]


def test_outputs_by_the_column_may_answer_a_part_of_the_batch() -> None:
    of = special_causes()
    causes = Causes(Batch.of_rows(map(record, of)))
    for where in ([1, 3], range(1, 3), [2], range(4, 4)):
        values = [{"n": n} for n in where]
        found = list(outputs.encode_each(Outputs("out", values, type="Done"), causes, where))
        assert found == [encode(Output("out", {"n": n}, type="Done"), of[n]) for n in where]


def test_headers_of_the_cause_are_passed_on_by_the_column() -> None:
    causes = Causes(Batch.of_rows(map(record, special_causes())))
    parcel = outputs.encode_each(Outputs("out", [1, 2, 3, 4], type="Done"), causes, range(4))
    found = [dict(output.headers()) for output in parcel]
    assert [headers["correlation-id"] for headers in found] == [b"e0", b"root", b"e2", b"e3"]
    assert [headers.get("traceparent") for headers in found] == [None, b"t-1", None, None]
    assert [headers["causation-id"] for headers in found] == [b"e0", b"e1", b"e2", b"e3"]
    assert {headers["type"] for headers in found} == {b"Done"}
    assert not any("other" in headers for headers in found)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (Outputs("out", [1]), r"there are 2 messages, 1 values and 2 keys; return a list of Output"),
        (Outputs("out", []), r"there are 2 messages, 0 values and 2 keys"),
        (Outputs("out", [1, 2, 3]), r"there are 2 messages, 3 values"),
        (Outputs("out", [1, 2], ["k"]), r"2 values and 1 keys"),
        (Outputs("out", [1, 2], [b"k"] * 3), r"2 values and 3 keys"),
        (Outputs("out", [1, 2], []), r"2 values and 0 keys"),
        (Outputs("", [1, 2]), r"topic of Outputs must be a name, not empty"),
        (Outputs("out", [1, object()]), r"(?i)object has no JSON form|type is not JSON serializable"),
        (Outputs("out", [1, 2], ["k", BAD_KEY]), r"key must be bytes, text or None, not int"),
    ],
)
def test_outputs_by_the_column_that_cannot_be_sent_are_refused(given: Outputs, says: str) -> None:
    causes = Causes(Batch.of_rows([record(cause(id_=f"e{n}")) for n in range(2)]))
    with pytest.raises(TypeError, match=says):
        outputs.encode_each(given, causes, range(2))


# --- parcels ---


def parcel() -> list[Outgoing]:
    """Out of order, with several outputs of some causes, and all that a row may hold."""
    return [
        encode(Output("b", None, None), at(7)),
        encode(Output("a", b"v", b"k", {"h": b"x", "n": None, "e": b""}), at(5), 1),
        encode(Output("a", "w", "", type="T"), at(5)),
        dead_letter(("a", b"1"), ("a", None), ("ü", b"\xff")),  # offset 43
        encode(Output("c", {"n": 1}, b"\xff"), at(9)),
        encode(Output("b", b"", b"k"), at(5), 2),
    ]


def at(offset: int) -> Message[Any]:
    return Message(f"e{offset}", "T", b"k", {}, (), "orders", 0, offset, None)


def test_parcel_gives_back_its_rows() -> None:
    rows = parcel()
    assert list(EncodedOutputs.of(rows)) == rows
    assert len(EncodedOutputs.of(rows)) == len(rows)
    assert (list(EncodedOutputs.of()), len(EncodedOutputs.of())) == ([], 0)


@pytest.mark.parametrize("where", [[], [0], [5, 0, 3], [1, 1], range(6), range(2, 4)])
def test_parcel_of_only_some_rows(where: Sequence[int]) -> None:
    rows = parcel()
    whole = EncodedOutputs.of(rows)
    assert list(whole.only(where)) == [rows[index] for index in where]
    assert list(whole) == rows


@pytest.mark.parametrize(("start", "end"), [(0, 6), (0, 0), (6, 6), (1, 4), (4, 9)])
def test_part_of_a_parcel(start: int, end: int) -> None:
    rows = parcel()
    part = EncodedOutputs.of(rows).part(start, end)
    assert list(part) == rows[start:end]


def test_parcel_is_sorted_by_offset_and_place() -> None:
    rows = parcel()
    assert [(row.source_offset, row.place) for row in EncodedOutputs.of(rows).sorted()] == [
        (5, 0),
        (5, 1),
        (5, 2),
        (7, 0),
        (9, 0),
        (43, outputs.DEAD_LETTER),
    ]
    assert sorted(EncodedOutputs.of(rows).sorted(), key=rows.index) == rows
    assert list(EncodedOutputs.of().sorted()) == []


def test_parcel_grows_at_its_end_and_leaves_the_other_as_it_is() -> None:
    rows = parcel()
    first, more = EncodedOutputs.of(rows[:2]), EncodedOutputs.of(rows[2:])
    part = first.part(0, 2)
    first.extend(more)
    first.extend(EncodedOutputs.of())
    assert list(first) == rows
    assert list(more) == rows[2:]
    assert list(part) == rows[:2], "a part is a copy"
    empty = EncodedOutputs.of()
    empty.extend(first)
    assert list(empty) == rows
    assert list(EncodedOutputs.of()) == []


@pytest.mark.parametrize("where", [range(6), [5, 4, 3, 2, 1, 0], [0], [4], [0, 4], [1, 2], [3], [2]])
def test_ledger_blob_of_columns_gives_back_what_went_in(where: Sequence[int]) -> None:
    sent = EncodedOutputs.of(parcel()).only(where)
    rows = list(sent)
    kept = there_and_back(sent)
    assert list(kept) == rows
    assert [output.headers() for output in kept] == [output.headers() for output in rows]
    assert list(sent) == rows, "packing changes nothing"
    kept.extend(sent)
    assert list(there_and_back(kept)) == rows * 2


def test_ledger_blob_of_outputs_by_the_column_gives_back_what_went_in() -> None:
    causes = Causes(Batch.of_rows(map(record, special_causes())))
    sent = outputs.encode_each(Outputs("out", [{"n": 1}, None, b"", "ü"], [b"k", None, "", "ü"], "T"), causes, range(4))
    sent.extend(outputs.encode_each(Outputs("other", [1, 2, 3, 4]), causes, range(4)))
    assert list(there_and_back(sent)) == list(sent)


def test_no_outputs_need_no_blob() -> None:
    assert stored.pack(EncodedOutputs.of()) is None


def test_blob_of_a_later_format_is_refused() -> None:
    head = orjson.dumps({"format": 99, "rows": []})
    with pytest.raises(ValueError, match="format 99"):
        stored.unpack(len(head).to_bytes(4, "big") + head, KEY)
