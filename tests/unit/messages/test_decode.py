"""Whatever a producer sends becomes a record with an outcome; decoding never raises."""

from __future__ import annotations

from dataclasses import dataclass
from decimal import Decimal
from typing import Any, TypedDict

import orjson
import pytest
from pydantic import BaseModel, field_validator

from processor import Database, Message
from processor.errors import ConfigError
from processor.handling.registry import _signature, _value_readers
from processor.messages.decode import MAX_STORED_ID_CHARS, REDRIVE, Decoder
from processor.messages.incoming import Incoming
from processor.messages.record import Record
from processor.messages.types import MessageType, MessageTypes
from processor.settings.schema import MessageSettings, Settings
from tests.support.readings import reading


class Model(BaseModel):
    amount: Decimal
    count: int


class Careless(BaseModel):
    name: str

    @field_validator("name")
    @classmethod
    def _known(cls, name: str) -> str:
        return {"known": "fine"}[name]


@dataclass
class Plain:
    count: int


class Typed(TypedDict):
    count: int


async def untyped(message, db): ...  # type: ignore[no-untyped-def]
async def bare(message: Message[Any], db: Database) -> None: ...
async def as_dict(message: Message[dict[str, Any]], db: Database) -> None: ...
async def as_model(message: Message[Model], db: Database) -> None: ...
async def as_careless(message: Message[Careless], db: Database) -> None: ...
async def as_dataclass(message: Message[Plain], db: Database) -> None: ...
async def as_typed_dict(message: Message[Typed], db: Database) -> None: ...
async def as_bytes(message: Message[bytes], db: Database) -> None: ...
async def as_optional(message: Message[Model | None], db: Database) -> None: ...
async def as_batch(messages: list[Message[Model]], db: Database) -> None: ...


def message_type(handler: Any) -> MessageType:
    _, _, annotation = _signature(handler)
    return MessageType("T", handler.__name__, *_value_readers(annotation))


READING = reading()


def decoder(types: MessageTypes, **message: Any) -> Decoder:
    message = {"id": ("header:message-id", "offset"), **message}
    return Decoder(Settings.model_construct(consumer="c", message=MessageSettings(**message)), types)


def decode(value: bytes | None, handler: Any = as_dict, **overrides: Any) -> Record:
    settings = overrides.pop("settings", {})
    fields: dict[str, Any] = {
        "timestamp_ms": 1,
        "key": b"k",
        "headers": [("type", b"T")],
        **overrides,
    }
    incoming = Incoming("orders", 0, 5, fields["timestamp_ms"], fields["key"], value, fields["headers"], "id1")
    return decoder(MessageTypes({"T": message_type(handler)}), **settings).decode(incoming, READING)


def reason(record: Record) -> str | None:
    return record.failure.reason if record.failure else None


@pytest.mark.parametrize(
    ("handler", "expected"),
    [
        (untyped, {"amount": 1.5, "count": 3}),
        (bare, {"amount": 1.5, "count": 3}),
        (as_dict, {"amount": 1.5, "count": 3}),
        (as_model, Model(amount=Decimal("1.5"), count=3)),
        (as_batch, Model(amount=Decimal("1.5"), count=3)),
        (as_dataclass, Plain(3)),
        (as_typed_dict, {"count": 3}),
        (as_bytes, b'{"amount": 1.5, "count": 3}'),
    ],
)
def test_annotation_decides_the_value(handler: Any, expected: Any) -> None:
    record = decode(b'{"amount": 1.5, "count": 3}', handler)
    assert record.failure is None
    assert record.message.value == expected


def test_money_keeps_every_digit() -> None:
    record = decode(b'{"amount": 1234567890123456.789012345678, "count": 1}', as_model)
    assert record.message.value.amount == Decimal("1234567890123456.789012345678")


@pytest.mark.parametrize(
    ("value", "handler", "expected"),
    [
        (b"", as_dict, "not_json"),
        (b"hello", as_dict, "not_json"),
        (b"\xff\xfe\x00", as_dict, "not_json"),
        (b"{", as_model, "not_json"),
        (b'{"a": NaN}', as_dict, "not_json"),
        (b'"\\ud800"', bare, "not_json"),
        (b"[" * 5000 + b"]" * 5000, as_dict, "not_json"),
        (b'{"a":' * 5000 + b"1" + b"}" * 5000, as_model, "not_json"),
        (b"[1]", as_dict, "wrong_shape"),
        (b"null", as_dict, "wrong_shape"),
        (b'{"count": "many"}', as_model, "wrong_shape"),
        (b'{"count": 99999999999999999999999999999999}', as_dict, "number_out_of_range"),
        (b'{"count": -9223372036854775809}', as_dict, "number_out_of_range"),
        (b'{"count": 1e999}', as_dict, "not_json"),
        (b'{"amount": 1e9999999999999999999, "count": 1234567890123456}', as_model, "number_out_of_range"),
        (b'{"amount": 1, "count": 1e999999999, "ref": 1234567890123456}', as_model, "number_out_of_range"),
        (b'{"count": 1e999999999}', as_model, "wrong_shape"),
        (b'{"name": "missing"}', as_careless, "undecodable"),
        (None, as_model, "null_value"),
        (b"x" * 2000, as_bytes, "oversized"),
        (b'{"a":"' + b"x" * 2000 + b'"}', as_dict, "oversized"),
    ],
)
def test_bad_value_is_a_failure_with_a_reason_and_the_evidence(
    value: bytes | None, handler: Any, expected: str
) -> None:
    settings = {"max_bytes": 1000} if expected == "oversized" else {"max_bytes": 100_000}
    record = decode(value, handler, settings=settings)
    assert reason(record) == expected
    assert record.payload == value


def test_nesting_at_the_limit_is_survived_whatever_this_python_can_parse() -> None:
    record = decode(b"[" * 1000 + b"1234567890123456789" + b"]" * 1000, bare)
    assert reason(record) in (None, "not_json")


@pytest.mark.parametrize("digits", ["9223372036854775807", "18446744073709551615", "-9223372036854775808"])
def test_integers_of_64_bits_are_fine(digits: str) -> None:
    record = decode(f'{{"count": {digits}}}'.encode(), as_dict)
    assert record.message.value == {"count": int(digits)}


def test_long_digits_inside_a_text_are_no_number() -> None:
    assert decode(b'{"card": "99999999999999999999999999999999"}', as_dict).failure is None


def test_delete_marker_reaches_a_handler_that_allows_it() -> None:
    for handler in (as_optional, bare, untyped):
        record = decode(None, handler, key=None)
        assert record.failure is None
        assert record.message.value is None
        assert record.payload is None
        assert record.payload_hash != decode(b"", handler, key=None).payload_hash, "not the same as an empty value"


def test_unknown_type_and_no_type_say_so() -> None:
    assert reason(decode(b"{}", headers=[("type", b"Other")])) == "unknown_type"
    assert reason(decode(b"{}", headers=[])) == "unknown_type"
    assert reason(decode(b"not json", headers=[])) == "not_json"


def test_star_takes_every_other_type() -> None:
    types = MessageTypes({"T": message_type(as_dict), "*": message_type(bare)})
    for type_ in ("U", None, ""):
        found = types.find(type_)
        assert found is not None
        assert found.handler == "bare"


@pytest.mark.parametrize(
    ("headers", "expected"),
    [([], "missing_id"), ([("message-id", b"a\0b")], "bad_id"), ([("message-id", b"x" * 600)], "bad_id")],
)
def test_unusable_id_fails_under_the_coordinates(headers: list[tuple[str, bytes]], expected: str) -> None:
    record = decode(b"{}", headers=[("type", b"T"), *headers], settings={"id": ("header:message-id",)})
    assert reason(record) == expected
    assert record.message.id == "orders:id1:0:5"


def test_redriven_record_is_the_message_that_its_header_names() -> None:
    """Neither what the chain finds, nor what scope and window make of it, is asked again."""
    settings = {"scope_by_type": True, "window_seconds": 60}
    headers = [("a", b"1"), ("message-id", b"m1"), ("type", b"T"), ("a", None)]
    once = decode(b"{}", headers=headers, settings=settings)
    again = decode(b"{}", headers=[*headers, (REDRIVE, b"c:T:m1@1700000040")], settings=settings)
    assert not once.redriven
    assert again.redriven
    assert again.failure is None
    assert again.message.id == "T:m1@1700000040"
    assert again.key == decode(b"{}", headers=[("type", b"T"), ("message-id", b"T:m1@1700000040")]).key
    assert list(again.message.headers) == headers
    assert again.size == once.size


def test_redriven_record_needs_no_timestamp_and_no_other_id() -> None:
    settings = {"id": ("header:message-id",), "window_seconds": 60}
    record = decode(b"{}", headers=[("type", b"T"), (REDRIVE, b"c:x")], timestamp_ms=None, settings=settings)
    assert record.failure is None
    assert record.message.id == "x"


def test_last_of_several_redrives_counts_and_none_is_left() -> None:
    record = decode(b"{}", headers=[(REDRIVE, b"c:one"), ("type", b"T"), (REDRIVE, b"c:two")])
    assert record.message.id == "two"
    assert list(record.message.headers) == [("type", b"T")]


@pytest.mark.parametrize(
    ("id_", "expected"),
    [
        (None, "missing_id"),
        (b"", "missing_id"),
        (b"\xff", "missing_id"),
        (b"c", "missing_id"),
        (b"c:", "missing_id"),
        (b"m", "missing_id"),
        (b"c:a\0b", "bad_id"),
        (b"c:" + b"x" * (MAX_STORED_ID_CHARS + 1), "bad_id"),
    ],
)
def test_redrive_under_an_unusable_id_fails_under_the_coordinates(id_: bytes | None, expected: str) -> None:
    record = decode(b"{}", headers=[("type", b"T"), ("message-id", b"m"), (REDRIVE, id_)])
    assert reason(record) == expected
    assert record.message.id == "orders:id1:0:5"
    assert record.redriven
    assert list(record.message.headers) == [("type", b"T"), ("message-id", b"m")]


@pytest.mark.parametrize("value", [b"{}", b"not json", None])
def test_redrive_for_another_consumer_is_not_for_us(value: bytes | None) -> None:
    """Under its own idea of identity, this consumer has had the message already, or never will."""
    record = decode(value, headers=[("type", b"T"), ("message-id", b"m"), (REDRIVE, b"other:m")])
    assert record.not_ours
    assert record.failure is None
    assert not record.in_inbox


def test_redriven_record_that_is_still_bad_fails_under_its_id() -> None:
    record = decode(b"not json", headers=[("type", b"T"), (REDRIVE, b"c:m")])
    assert reason(record) == "not_json"
    assert record.message.id == "m"
    assert record.failure is not None
    assert record.failure.kind == "poison"


def test_type_with_nul_is_made_storable() -> None:
    record = decode(b"{}", headers=[("type", b"T\0")])
    assert reason(record) == "unknown_type"
    assert "\0" not in (record.message.type or "")


@pytest.mark.parametrize("timestamp_ms", [2**62, -(2**62), None, 0])
def test_any_timestamp_is_survived(timestamp_ms: int | None) -> None:
    assert decode(b"{}", timestamp_ms=timestamp_ms).failure is None


def test_hundred_headers_with_raw_bytes_are_kept_in_order() -> None:
    headers = [("type", b"T"), *((f"h{i}", bytes([i, 255])) for i in range(100))]
    assert list(decode(b"{}", headers=headers).message.headers) == headers


def test_same_value_has_the_same_hash_and_another_value_another() -> None:
    assert decode(b"{}").payload_hash == decode(b"{}").payload_hash
    assert decode(b"{}").payload_hash != decode(orjson.dumps({"a": 1})).payload_hash


async def one_parameter(message: Message[Any]) -> None: ...
async def three_parameters(message: Message[Any], db: Database, more: int) -> None: ...
async def wrong_annotation(message: int, db: Database) -> None: ...
def not_async(message: Message[Any], db: Database) -> None: ...


@pytest.mark.parametrize("handler", [one_parameter, three_parameters, wrong_annotation, not_async])
def test_signature_that_cannot_work_is_refused_by_name(handler: Any) -> None:
    with pytest.raises(ConfigError, match=handler.__name__):
        _signature(handler)
