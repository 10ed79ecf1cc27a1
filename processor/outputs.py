"""What goes out, encoded once: for Kafka, and for the ledger row that keeps it until Kafka has it.

An output's `message-id` is made from the consumer, the id of its cause and its place among the
cause's outputs. It is the same on every re-send, whoever sends it, so that a processor
downstream drops the repeat by default.

A ledger blob is a JSON head (lengths and names) followed by all bytes in a row: cheap to write
with every batch, free of code to run on reading, and independent of versions of Python.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import orjson
from pydantic import BaseModel

from processor.records import Message, Output

MESSAGE_ID = "message-id"
CAUSATION_ID = "causation-id"
CORRELATION_ID = "correlation-id"
TRACEPARENT = "traceparent"
TYPE = "type"

# Two lengths, of at most five bytes each.
HEADER_OVERHEAD = 10

_FORMAT = 1


@dataclass(slots=True)
class Outgoing:
    """One record ready to be produced, and the input offset that caused it."""

    source_offset: int
    topic: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, str | bytes | None]]

    @property
    def size(self) -> int:
        headers = sum(len(name.encode()) + len(value or b"") + HEADER_OVERHEAD for name, value in self.headers)
        return len(self.value or b"") + len(self.key or b"") + headers


def encode(output: Output, cause: Message[Any], index: int, consumer: str) -> Outgoing:
    if not output.topic:
        raise TypeError(f"an Output's topic must be a name, not {output.topic!r}")
    headers: dict[str, bytes | None] = {
        MESSAGE_ID: message_id(consumer, cause.id, index).encode(),
        CAUSATION_ID: cause.id.encode(),
        CORRELATION_ID: cause.header(CORRELATION_ID) or cause.id.encode(),
    }
    traceparent = cause.header(TRACEPARENT)
    if traceparent is not None:
        headers[TRACEPARENT] = traceparent
    if output.type is not None:
        headers[TYPE] = output.type.encode()
    for name, value in (output.headers or {}).items():
        headers[name] = _bytes(f"header {name!r}", value)
    return Outgoing(cause.offset, output.topic, _bytes("key", output.key), _value(output.value), list(headers.items()))


def message_id(consumer: str, cause_id: str, index: int) -> str:
    """Never change this: a re-send by a newer version must carry the same id."""
    return hashlib.blake2b(f"{consumer}\0{cause_id}\0{index}".encode(), digest_size=16).hexdigest()


def dump_json(value: Any) -> bytes:
    return orjson.dumps(value, default=_plain)


def pack(outputs: Sequence[Outgoing]) -> bytes | None:
    """None for no outputs: the ledger has nothing to keep."""
    if not outputs:
        return None
    body: list[bytes] = []

    def put(part: str | bytes | None) -> int:
        if part is None:
            return -1
        if isinstance(part, str):
            part = part.encode()
        body.append(part)
        return len(part)

    rows = [
        (
            o.source_offset,
            o.topic,
            put(o.key),
            put(o.value),
            [(name, put(value)) for name, value in o.headers],
        )
        for o in outputs
    ]
    head = orjson.dumps({"format": _FORMAT, "rows": rows})
    return b"".join((len(head).to_bytes(4, "big"), head, *body))


def unpack(blob: bytes | None) -> list[Outgoing]:
    if blob is None:
        return []
    start = 4 + int.from_bytes(blob[:4], "big")
    head = orjson.loads(blob[4:start])
    if head["format"] != _FORMAT:
        raise ValueError(f"ledger outputs have format {head['format']}, this version reads {_FORMAT}")
    cursor = start

    def take(length: int) -> bytes | None:
        nonlocal cursor
        if length < 0:
            return None
        cursor += length
        return blob[cursor - length : cursor]

    # The order of these calls is the order of `put` above.
    return [
        Outgoing(source, topic, take(key), take(value), [(name, take(length)) for name, length in headers])
        for source, topic, key, value, headers in head["rows"]
    ]


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
        return str(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} has no JSON form")
