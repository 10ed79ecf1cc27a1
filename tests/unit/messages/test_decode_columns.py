"""Records decoded by the column come out as if each had been decoded by itself, whatever its neighbours are."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any

import orjson
import pytest
from pydantic import BaseModel, field_validator

from processor import Database, Message
from processor.handling.registry import _signature, _value_readers
from processor.messages.batch import Batch
from processor.messages.decode import (
    MAX_ID_CHARS,
    MAX_STORED_ID_CHARS,
    PIECES,
    REDRIVE,
    Decoder,
    _incoming,
)
from processor.messages.formats.json import DIGITS
from processor.messages.incoming import Incoming, RawColumns
from processor.messages.message import Partition
from processor.messages.record import Reading, Record
from processor.messages.types import MessageType, MessageTypes
from processor.settings.schema import MessageSettings, Settings
from tests.support.readings import reading

MAX_BYTES = 4000
PIECE = PIECES[0]
READING = reading(3)


class Order(BaseModel):
    order_id: int
    amount: Decimal
    event_id: str | int | None = None


class Careful(BaseModel):
    amount: Decimal

    @field_validator("amount")
    @classmethod
    def _known(cls, amount: Decimal) -> Decimal:
        if amount > 1_000_000:
            raise KeyError(amount)  # a bug in a validator, not what pydantic expects of one
        return amount


async def as_any(message: Message[Any], db: Database) -> None: ...
async def as_dict(message: Message[dict[str, Any]], db: Database) -> None: ...
async def as_bytes(message: Message[bytes], db: Database) -> None: ...
async def as_order(message: Message[Order], db: Database) -> None: ...
async def as_careful(message: Message[Careful], db: Database) -> None: ...
async def as_optional(message: Message[Order | None], db: Database) -> None: ...
async def as_batch(messages: list[Message[Order]], db: Database) -> None: ...


@dataclass(frozen=True)
class Raw:
    """As confluent_kafka hands records over, as far as the decoder looks."""

    of_value: bytes | None
    of_key: bytes | None = b"k"
    of_headers: Sequence[tuple[str, bytes | None]] | None = None
    of_timestamp: tuple[int, int] = (1, 1_700_000_000_000)
    of_offset: int = 0
    unreadable: bool = False

    def value(self) -> bytes | None:
        return self.of_value

    def key(self) -> bytes | None:
        return self.of_key

    def headers(self) -> Any:
        if self.unreadable:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
        return self.of_headers

    def offset(self) -> int:
        return self.of_offset

    def timestamp(self) -> tuple[int, int]:
        return self.of_timestamp


@dataclass
class Maker:
    """Random records from a seed: plain ones, and odd ones of every kind."""

    random: random.Random
    types: Sequence[str]
    made: int = 0
    odd: dict[str, Callable[[], Raw]] = field(init=False)

    def __post_init__(self) -> None:
        def put(**changes: Any) -> Callable[[], Raw]:
            return lambda: self.plain(**changes)

        def without(*names: str) -> Callable[[], Raw]:
            return lambda: self.plain(drop=names)

        def value(text: bytes | None) -> Callable[[], Raw]:
            return lambda: replace(self.plain(), of_value=text)

        def digits(text: str) -> Callable[[], Raw]:
            def make() -> Raw:
                raw = self.plain(amount="DIGITS")
                return replace(raw, of_value=(raw.of_value or b"").replace(b'"DIGITS"', text.encode()))

            return make

        def headers(*more: tuple[str, bytes | None]) -> Callable[[], Raw]:
            def make() -> Raw:
                raw = self.plain()
                return replace(raw, of_headers=[*(raw.of_headers or ()), *more])

            return make

        def raw(**fields: Any) -> Callable[[], Raw]:
            return lambda: replace(self.plain(), **fields)

        self.odd = {
            "null value": value(None),
            "null key": raw(of_key=None),
            "null key and value": raw(of_key=None, of_value=None),
            "key that is no text": raw(of_key=b"\xff\xfe"),
            "empty value": value(b""),
            "broken JSON": value(b'{"event_id": "e'),
            "not UTF-8": value(b'{"event_id": "\xff"}'),
            "lone surrogate": value(b'{"event_id": "\\ud800", "type": "A"}'),
            "byte order mark": value(b'\xef\xbb\xbf{"event_id": "bom"}'),
            "array": value(b'["event_id"]'),
            "text": value(b'"event_id"'),
            "number": value(b"17"),
            "null": value(b"null"),
            "empty object": value(b"{}"),
            "deep nesting": value(b"[" * 1500 + b"]" * 1500),
            "same key twice": value(b'{"event_id": "one", "event_id": "two", "type": "A", "order_id": 1, "amount": 1}'),
            "white space around": value(b' \n{"event_id": "w", "order_id": 1, "amount": 2}\t '),
            "NaN": digits("NaN"),
            "infinite": digits("1e999"),
            "huge integer": digits("99999999999999999999999999"),
            "integer just within": digits("18446744073709551615"),
            "integer just beyond": digits("18446744073709551616"),
            "long fraction": digits("0.123456789012345678901234567890"),
            "long fraction with exponent": digits("1234567890123456789.5e-5"),
            "huge exponent": digits("1234567890123456e99999"),
            "long digits in a text": put(card="9" * 40),
            "beyond a validator": digits("2000000"),
            "wrong shape": put(amount=[1]),
            "no order": without("order_id"),
            "no id in the payload": without("event_id", "nested"),
            "no id at all": lambda: replace(self.plain(drop=("event_id", "nested", "order_id")), of_headers=None),
            "empty id": put(event_id=""),
            "integer for an id": put(event_id=12345),
            "fraction for an id": put(event_id=1.5e300),
            "true for an id": put(event_id=True),
            "null for an id": put(event_id=None),
            "list for an id": put(event_id=["e"]),
            "nested id that is none": put(nested="flat"),
            "NUL in id": put(event_id="a\0b"),
            "longest id": put(event_id="x" * MAX_ID_CHARS),
            "too long an id": put(event_id="ü" * (MAX_ID_CHARS + 1)),
            "NUL in header id": headers(("message-id", b"a\0b")),
            "too long a header id": headers(("message-id", b"y" * 600)),
            "header id that is no text": headers(("message-id", b"\xff")),
            "null header id": headers(("message-id", None)),
            "empty header id": headers(("message-id", b"")),
            "header twice": headers(("message-id", b"first"), ("message-id", b"second")),
            "many headers": headers(*((f"h{n}", bytes([n])) for n in range(50))),
            "redriven": headers((REDRIVE, b"c:orders:3:17")),
            "redriven from elsewhere in the headers": lambda: replace(
                self.plain(), of_headers=[(REDRIVE, b"c:r"), ("a", None)]
            ),
            "redriven without a type": lambda: replace(self.plain(None), of_headers=[(REDRIVE, "c:ü".encode())]),
            "redriven twice": headers((REDRIVE, b"c:one"), ("a", b"1"), (REDRIVE, b"c:two"), ("a", b"2")),
            "redriven for another consumer": headers((REDRIVE, b"other:m")),
            "redriven under nothing": headers((REDRIVE, None)),
            "redriven under an empty id": headers((REDRIVE, b"")),
            "redriven under what is no text": headers((REDRIVE, b"\xff")),
            "redriven under a NUL": headers((REDRIVE, b"c:a\0b")),
            "redriven under too long an id": headers((REDRIVE, b"c:" + b"y" * (MAX_STORED_ID_CHARS + 1))),
            "value that names the header": headers(("a", REDRIVE.encode())),
            "unreadable headers": raw(unreadable=True),
            "no headers": raw(of_headers=None),
            "empty list of headers": raw(of_headers=[]),
            "unknown type": lambda: self.plain("Nobody"),
            "no type": lambda: self.plain(None),
            "empty type": lambda: self.plain(""),
            "NUL in type": lambda: self.plain("A\0"),
            "NUL in front of type": lambda: self.plain("\0A"),
            "too long a type": lambda: self.plain("A" * 600),
            "another type": lambda: self.plain(self.random.choice("ABCDEFG")),
            "type in the payload only": lambda: replace(self.plain("B"), of_headers=None),
            "type that is a number": put(type=5),
            "no timestamp": raw(of_timestamp=(0, 0)),
            "no timestamp but a number": raw(of_timestamp=(0, 99)),
            "timestamp before the calendar": raw(of_timestamp=(1, -(2**62))),
            "timestamp of the broker": raw(of_timestamp=(2, 1_600_000_000_001)),
            "largest value": lambda: self.padded(MAX_BYTES),
            "too large a value": lambda: self.padded(MAX_BYTES + 1),
        }

    def plain(self, type_: str | None = "?", drop: Sequence[str] = (), **changes: Any) -> Raw:
        self.made += 1
        if type_ == "?":
            type_ = self.random.choice(self.types)
        document = {
            "event_id": f"e{self.made}",
            "type": type_,
            "nested": {"id": f"n{self.made}"},
            "order_id": self.made,
            "amount": round(self.random.uniform(0, 1000), 2),
            "odd/name": f"o{self.made}",
            **changes,
        }
        headers: list[tuple[str, bytes | None]] = [("message-id", f"h{self.made}".encode())]
        if type_ is not None:
            headers.append(("type", type_.encode()))
        return Raw(
            orjson.dumps({name: value for name, value in document.items() if name not in drop}),
            f"k{self.made % 7}".encode(),
            headers,
            (1, 1_700_000_000_000 + self.made * 997),
        )

    def padded(self, size: int) -> Raw:
        return self.plain(padding="x" * (size - len(self.plain(padding="").of_value or b"")))

    def records(self) -> list[Raw]:
        """Pieces without anything odd, with one odd record, and with little else."""
        made: list[Raw] = []
        for odd in (0, 1, 60, 0, 1, 20):
            piece = [self.plain() for _ in range(PIECE)]
            for place in self.random.sample(range(PIECE), odd):
                piece[place] = self.random.choice(list(self.odd.values()))()
            made += piece
        return [replace(raw, of_offset=100 + index) for index, raw in enumerate(made)]


HANDLERS: dict[str, Any] = {
    "A": as_dict,
    "B": as_bytes,
    "C": as_order,
    "D": as_any,
    "E": as_careful,
    "F": as_optional,
    "G": as_batch,
}


def types_of(handlers: dict[str, Any] = HANDLERS) -> MessageTypes:
    made = {}
    for name, handler in handlers.items():
        _, _, annotation = _signature(handler)
        made[name] = MessageType(name, handler.__name__, *_value_readers(annotation), in_inbox=name != "B")
    return MessageTypes(made)


def decoder(handled: MessageTypes, **message: Any) -> Decoder:
    settings = MessageSettings(**{"max_bytes": MAX_BYTES, "type": ("header:type",), **message})
    return Decoder(Settings.model_construct(consumer="c", message=settings), handled)


def alone(decoder: Decoder, raw: Raw) -> Record:
    return decoder.decode(_incoming(raw, READING), READING)


def facts(record: Record) -> dict[str, Any]:
    """Everything there is to know about it."""
    message = record.message
    return {
        **{name: getattr(message, name) for name in Message.__slots__},
        "headers": list(message.headers),
        "type of value": type(message.value),
        "timestamp": message.timestamp,
        **{f"record.{name}": getattr(record, name) for name in Record.__slots__ if name != "message"},
    }


CHAINS: dict[str, dict[str, Any]] = {
    "header": {"id": ("header:message-id",)},
    "header or offset": {"id": ("header:message-id", "offset")},
    "flat": {"id": ("payload:/event_id",), "type": ("payload:/type",)},
    "nested": {"id": ("payload:/nested/id", "payload:/event_id", "content-hash")},
    "escaped": {"id": ("payload:/odd~1name",), "type": ("payload:/type", "header:type")},
    "business": {"id": ("business:order:{order_id}:{type}:{key}", "offset")},
    "business alone": {"id": ("business:{event_id}-{order_id}",), "type": ("constant:C",)},
    "content hash": {"id": ("content-hash",), "type": ("header:type", "constant:D")},
    "offset": {"id": ("offset",)},
    "scope": {"id": ("payload:/event_id", "offset"), "scope_by_type": True},
    "window": {"id": ("header:message-id",), "window_seconds": 60},
    "both": {"id": ("payload:/event_id",), "type": ("payload:/type",), "scope_by_type": True, "window_seconds": 7},
}


@pytest.mark.parametrize("types", ["A", "B", "C", "D", "E", "F", "G", "AAAAAB", "ABCDEFG"])
@pytest.mark.parametrize("chain", CHAINS)
def test_all_at_once_gives_what_one_by_one_gives(chain: str, types: str, monkeypatch: pytest.MonkeyPatch) -> None:
    raws = Maker(random.Random(f"{chain} {types}"), types).records()
    handled = types_of(HANDLERS | ({"*": as_any} if "offset" in chain else {}))
    decoding = decoder(handled, **CHAINS[chain])
    expected = [facts(alone(decoding, raw)) for raw in raws]

    one_by_one = 0
    decode = Decoder.decode

    def counted(self: Decoder, incoming: Incoming, reading: Reading) -> Record:
        nonlocal one_by_one
        one_by_one += 1
        return decode(self, incoming, reading)

    monkeypatch.setattr(Decoder, "decode", counted)
    found = [facts(record) for record in Batch(decoding.decode_all(raws, READING)).as_rows()]
    assert len(found) == len(expected)
    for is_, should_be in zip(found, expected, strict=True):
        assert is_ == should_be
    assert one_by_one, "no piece was odd: this has shown little"
    if not chain.startswith("business"):  # which is always read one by one
        assert one_by_one < len(raws), "no piece was usual: this has shown nothing"


KINDS = list(Maker(random.Random(0), "A").odd)


@pytest.mark.parametrize("kind", KINDS)
def test_one_odd_record_leaves_its_neighbours_as_they_are(kind: str) -> None:
    for chain, types in (("header or offset", "C"), ("both", "A")):
        decoding = decoder(types_of(), **CHAINS[chain])
        make = Maker(random.Random(kind), types)
        usual = [replace(make.plain(), of_offset=n) for n in range(PIECE + 10)]
        expected = [facts(record) for record in Batch(decoding.decode_all(usual, READING)).as_rows()]
        for place in (PIECE - 1, PIECE):
            odd = replace(make.odd[kind](), of_offset=place)
            raws = [*usual[:place], odd, *usual[place + 1 :]]
            found = [facts(record) for record in Batch(decoding.decode_all(raws, READING)).as_rows()]
            assert found[:place] == expected[:place]
            assert found[place] == facts(alone(decoding, odd))
            assert found[place + 1 :] == expected[place + 1 :]


def test_redriven_record_is_marked_and_its_neighbours_are_not() -> None:
    decoding = decoder(types_of(), **CHAINS["both"])
    make = Maker(random.Random(0), "A")
    raws = [make.plain() for _ in range(PIECE)]
    raws[7] = replace(raws[7], of_headers=[*(raws[7].of_headers or ()), (REDRIVE, b"c:A:e8@0")])
    records = Batch(decoding.decode_all(raws, READING)).as_rows()
    assert [record.redriven for record in records] == [place == 7 for place in range(PIECE)]
    assert records[7].message.id == "A:e8@0"


def test_nothing_to_decode_is_fine() -> None:
    assert decoder(types_of(), **CHAINS["flat"]).decode_all([], READING) == []


@pytest.mark.parametrize("where", [[], [0], [3], [7], [0, 1, 7], list(range(8))])
def test_values_with_a_run_of_digits_are_found_wherever_they_stand(where: list[int]) -> None:
    values = [(b"9" * 30 + b"x" if at in where else b"x" * at) for at in range(8)]
    columns = RawColumns((), values, Partition("t", 0))
    assert list(columns._with_run_of(DIGITS, b"0" * 19)) == where


def test_a_run_of_digits_does_not_begin_in_one_value_and_end_in_the_next() -> None:
    columns = RawColumns((), [b"1" * 18, b"1" * 18], Partition("t", 0))
    assert list(columns._with_run_of(DIGITS, b"0" * 19)) == []
