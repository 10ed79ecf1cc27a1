"""Outputs, encoded once: for Kafka, and for the ledger row that keeps them until Kafka has them.

An output's `message-id` is made from the inbox key of its cause (and so from consumer and message
id) and from its place among the cause's outputs. It is the same on every re-send by any instance,
so that a processor downstream drops the repeat by default.

A ledger blob (stored.py) is a JSON head, with columns of numbers and names, followed by all bytes:
cheap to write with every batch, safe to read because it runs no code, and independent of Python
versions. Headers that follow from the cause are made again on reading instead of being stored.

A dead letter is sent in the same way, but keeps the headers of the record that it is about: it gets
no standard headers, and above all no id of its own. See letters.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from math import isfinite
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import orjson
from pydantic import BaseModel

from processor.messages.batch import Batch
from processor.messages.message import Headers, Output, Outputs, last_header

T = TypeVar("T")

MESSAGE_ID = "message-id"
CAUSATION_ID = "causation-id"
CORRELATION_ID = "correlation-id"
TRACEPARENT = "traceparent"
TYPE = "type"
REPLAY = "replay"  # its name, in what a replay has sent

# Bytes that Kafka's format adds to a header: two lengths of at most five bytes each.
HEADER_OVERHEAD = 10

# Stands for a dead letter's place among the outputs of its cause. Ledger rows hold it: never change it.
DEAD_LETTER = -1


class Outgoing(NamedTuple):
    """One record ready to be produced, and the input record that caused it."""

    source_offset: int
    topic: str
    key: bytes | None
    value: bytes | None
    cause_id: str
    place: int  # its place among the outputs of its cause, or DEAD_LETTER
    id: str | None  # None for a dead letter
    extra: Headers | None = None  # an output's headers that win over the standard ones; a dead letter's only headers

    def headers(self) -> list[tuple[str, bytes | None]]:
        """Return the headers as Kafka gets them."""
        return headers(self.id, self.cause_id, self.extra)

    def size(self) -> int:
        of_headers = sum(len(name.encode()) + len(value or b"") + HEADER_OVERHEAD for name, value in self.headers())
        return len(self.value or b"") + len(self.key or b"") + of_headers


def headers(id_: str | None, cause_id: str, extra: Headers | None) -> list[tuple[str, bytes | None]]:
    """Return the headers of an output or a dead letter as Kafka gets them."""
    if id_ is None:
        return list(extra or ())
    standard = {MESSAGE_ID: id_.encode(), CAUSATION_ID: cause_id.encode(), CORRELATION_ID: cause_id.encode()}
    return list((standard | dict(extra or ())).items())


class EncodedOutputs:
    """Records ready to be produced, as columns: the fields of `Outgoing` for many records."""

    __slots__ = ("causes", "extras", "ids", "keys", "offsets", "places", "topics", "values")

    def __init__(
        self,
        offsets: list[int],
        topics: list[str],
        keys: list[bytes | None],
        values: list[bytes | None],
        causes: list[str],
        places: list[int],
        ids: list[str | None],
        extras: list[Headers | None],
    ) -> None:
        self.offsets = offsets
        self.topics = topics
        self.keys = keys
        self.values = values
        self.causes = causes
        self.places = places
        self.ids = ids
        self.extras = extras

    @classmethod
    def of(cls, rows: Iterable[Outgoing] = ()) -> EncodedOutputs:
        columns = [list(column) for column in zip(*rows, strict=True)]
        return cls(*(columns or [[] for _ in cls.__slots__]))

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[Outgoing]:
        return map(Outgoing, *self._columns())

    def extend(self, more: EncodedOutputs) -> None:
        for column, added in zip(self._columns(), more._columns(), strict=True):
            column.extend(added)

    def part(self, start: int, end: int) -> EncodedOutputs:
        return EncodedOutputs(*(column[start:end] for column in self._columns()))

    def only(self, where: Sequence[int]) -> EncodedOutputs:
        return EncodedOutputs(*([column[index] for index in where] for column in self._columns()))

    def sorted(self) -> EncodedOutputs:
        """Return the outputs in order of offset, and of place among the outputs of a cause."""
        return self.only(sorted(range(len(self)), key=lambda index: (self.offsets[index], self.places[index])))

    def _columns(self) -> tuple[list[Any], ...]:
        return (
            self.offsets,
            self.topics,
            self.keys,
            self.values,
            self.causes,
            self.places,
            self.ids,
            self.extras,
        )


class Causes:
    """What outputs need to know about the records of a batch, as columns."""

    __slots__ = ("headers", "ids", "inbox_keys", "offsets")

    def __init__(self, batch: Batch) -> None:
        if (columns := batch.columns) is not None:
            self.offsets: list[int] = columns.column("offsets")
            self.ids: list[str] = columns.column("ids")
            self.headers: list[Headers] = columns.column("headers")
            self.inbox_keys: list[bytes] = columns.column("inbox_keys")
        else:
            records = batch.rows
            self.offsets = [record.message.offset for record in records]
            self.ids = [record.message.id for record in records]
            self.headers = [record.message.headers for record in records]
            self.inbox_keys = [record.key for record in records]


def encode_all(outputs: Sequence[Output], causes: Causes, where: Sequence[int], places: list[int]) -> EncodedOutputs:
    """Encode outputs of a batch; `where` has the index of the record that each answers, `places` its place there."""
    headers = _pick(causes.headers, where)
    own = [output.type is not None or output.headers for output in outputs]
    extras: list[Headers | None] = [None] * len(outputs)
    if any(own) or any(headers):
        extras = [
            _extra(output.type, output.headers, of_cause) if special or of_cause else None
            for output, special, of_cause in zip(outputs, own, headers, strict=True)
        ]
    topics = [output.topic for output in outputs]
    if not all(topics):
        raise TypeError("an Output's topic must be a name, not empty")
    keys, values = [output.key for output in outputs], [output.value for output in outputs]
    return _encode(topics, keys, values, extras, causes, where, places)


def encode_each(outputs: Outputs, causes: Causes, where: Sequence[int]) -> EncodedOutputs:
    """Encode one output for each of the records at these indexes."""
    count = len(where)
    keys = [None] * count if outputs.keys is None else outputs.keys
    if len(outputs.values) != count or len(keys) != count:
        raise TypeError(
            f"Outputs are one for each message: there are {count} messages, {len(outputs.values)} values and "
            f"{len(keys)} keys; return a list of Output for anything else"
        )
    if not outputs.topic:
        raise TypeError("the topic of Outputs must be a name, not empty")
    headers = _pick(causes.headers, where)
    extras: list[Headers | None] = [None] * count
    if outputs.type is not None or any(headers):
        extras = [_extra(outputs.type, None, of_cause) for of_cause in headers]
    return _encode([outputs.topic] * count, keys, outputs.values, extras, causes, where, [0] * count)


def _encode(
    topics: list[str],
    keys: Sequence[bytes | str | None],
    values: Sequence[Any],
    extras: list[Headers | None],
    causes: Causes,
    where: Sequence[int],
    places: list[int],
) -> EncodedOutputs:
    kinds = set(map(type, keys))
    if kinds == {str}:
        encoded_keys: list[bytes | None] = [key.encode() for key in keys]  # type: ignore[union-attr]
    else:
        encoded_keys = list(keys) if kinds == {bytes} else [_bytes("key", key) for key in keys]  # type: ignore[arg-type]
    if set(map(type, values)) == {dict}:
        encoded_values: list[bytes | None] = _dump_all(values)
    else:
        encoded_values = list(map(_value, values))
    inbox_keys = _pick(causes.inbox_keys, where)
    return EncodedOutputs(
        _pick(causes.offsets, where),
        topics,
        encoded_keys,
        encoded_values,
        _pick(causes.ids, where),
        places,
        [f"{key.hex()}-{place}" for key, place in zip(inbox_keys, places, strict=True)],  # as message_id does
        extras,
    )


def _pick(column: list[T], where: Sequence[int]) -> list[T]:
    if isinstance(where, range):
        return column[where.start : where.stop]
    return [column[index] for index in where]


def message_id(cause_key: bytes, index: int) -> str:
    """Return the id of a cause's output. Never change it: a re-send by a newer version must carry the same id."""
    return f"{cause_key.hex()}-{index}"


def _extra(type_: str | None, headers: Mapping[str, bytes | str | None] | None, cause: Headers) -> Headers | None:
    """Return the headers that do not follow from the cause's id; they win over those that do."""
    extra: dict[str, bytes | None] = {}
    for name in (CORRELATION_ID, TRACEPARENT):
        passed_on = last_header(cause, name)
        if passed_on:
            extra[name] = passed_on
    if type_ is not None:
        extra[TYPE] = type_.encode()
    for name, value in (headers or {}).items():
        extra[name] = _bytes(f"header {name!r}", value)
    return tuple(extra.items()) or None


def dump_json(value: Any) -> bytes:
    encoded = orjson.dumps(value, default=_plain)
    if b"null" in encoded:
        _refuse_nan(value)
    return encoded


def _dump_all(values: Sequence[Any]) -> list[bytes | None]:
    """Return `dump_json` of each value; whether one has a null is looked up once for all."""
    encoded = [orjson.dumps(value, default=_plain) for value in values]
    if b"null" in b"".join(encoded):
        for value, text in zip(values, encoded, strict=True):
            if b"null" in text:
                _refuse_nan(value)
    return [*encoded]


def _refuse_nan(value: Any) -> None:
    """Raise for a value with a null in its JSON that was NaN or infinity: orjson writes these as null silently."""
    if _may_hold_nan((value,)) and (path := _path_to_nan(value)) is not None:
        where = f" at /{'/'.join(path)}" if path else ""
        raise ValueError(f"NaN or infinity{where}: JSON has no such number; write None if you mean null")


_NEVER_NAN = frozenset((str, int, bool, type(None), datetime, date, UUID))


def _may_hold_nan(items: Iterable[Any]) -> bool:
    """Return whether `_path_to_nan` has to look closer; quick, because many outputs hold a null on purpose."""
    for item in items:
        kind = type(item)
        if kind in _NEVER_NAN:
            continue
        if kind is float:
            if not isfinite(item):
                return True
        elif kind is dict:
            if _may_hold_nan(item.values()):
                return True
        elif kind is not list or _may_hold_nan(item):
            return True
    return False


def _path_to_nan(value: Any) -> tuple[str, ...] | None:
    if isinstance(value, float):
        return None if isfinite(value) else ()
    if value is None or isinstance(value, str | int):
        return None
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list | tuple | set | frozenset):
        items = enumerate(value)
    elif isinstance(value, BaseModel):
        return _path_to_nan(value.model_dump(mode="json"))
    elif isinstance(value, Enum):
        return _path_to_nan(value.value)
    elif is_dataclass(value):
        items = ((field.name, getattr(value, field.name)) for field in fields(value))
    for name, item in items:
        path = _path_to_nan(item)
        if path is not None:
            return (str(name), *path)
    return None


def _bytes(what: str, value: bytes | str | None) -> bytes | None:
    if isinstance(value, str):
        return value.encode()
    if value is None or isinstance(value, bytes):
        return value
    raise TypeError(f"an Output's {what} must be bytes, text or None, not {type(value).__name__}")


def _value(value: Any) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode()
    return dump_json(value)


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Decimal):
        if not value.is_finite():
            raise ValueError(f"{value}: JSON has no such number")
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
