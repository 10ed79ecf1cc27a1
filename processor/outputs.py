"""What goes out, encoded once: for Kafka, and for the ledger row that keeps it until Kafka has it.

An output's `message-id` is made from the inbox key of its cause, and so from consumer and message
id, and its place among the cause's outputs. It is the same on every re-send, whoever sends it, so
that a processor downstream drops the repeat by default.

A ledger blob is a JSON head (lengths and names) followed by all bytes in a row: cheap to write
with every batch, free of code to run on reading, and independent of versions of Python. Headers
that follow from the cause are made again on reading instead of being kept.

A dead letter goes the same way, but as the record that it is about: nothing of ours stands among
its headers, least of all an id of its own. See dead_letters.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from decimal import Decimal
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple

import orjson
from pydantic import BaseModel

from processor.records import Headers, Message, Output, Record

MESSAGE_ID = "message-id"
CAUSATION_ID = "causation-id"
CORRELATION_ID = "correlation-id"
TRACEPARENT = "traceparent"
TYPE = "type"

# Two lengths, of at most five bytes each.
HEADER_OVERHEAD = 10

# In place of a place among the outputs of a cause. Ledger rows hold it: never change it.
DEAD_LETTER = -1

_FORMAT = 1


class Outgoing(NamedTuple):
    """One record ready to be produced, and the input record that caused it."""

    source_offset: int
    topic: str
    key: bytes | None
    value: bytes | None
    cause_id: str
    place: int  # its place among the outputs of its cause, or DEAD_LETTER
    id: str | None  # None for a dead letter
    extra: Headers | None = None  # of an output: those that win over the standard ones; of a dead letter: all

    def headers(self) -> list[tuple[str, bytes | None]]:
        """As they go on the wire."""
        if self.id is None:
            return list(self.extra or ())
        cause = self.cause_id.encode()
        standard: list[tuple[str, bytes | None]] = [
            (MESSAGE_ID, self.id.encode()),
            (CAUSATION_ID, cause),
            (CORRELATION_ID, cause),
        ]
        return standard if self.extra is None else list((dict(standard) | dict(self.extra)).items())

    def size(self) -> int:
        headers = sum(len(name.encode()) + len(value or b"") + HEADER_OVERHEAD for name, value in self.headers())
        return len(self.value or b"") + len(self.key or b"") + headers


def encode(output: Output, cause: Record, place: int) -> Outgoing:
    """An output, the record that it answers, and its place among that one's outputs."""
    message = cause.message
    if not output.topic:
        raise TypeError(f"an Output's topic must be a name, not {output.topic!r}")
    key, value = output.key, output.value
    return Outgoing(
        message.offset,
        output.topic,
        key.encode() if type(key) is str else _bytes("key", key),
        orjson.dumps(value, default=_plain) if type(value) is dict else _value(value),
        message.id,
        place,
        message_id(cause.key, place),
        _extra(output, message) if output.type is not None or output.headers or message.headers else None,
    )


def encode_all(outputs: Sequence[Output], causes: Sequence[Record], places: Sequence[int]) -> list[Outgoing]:
    """What `encode` gives for each, by the column: there is one for nearly every record that is processed."""
    messages = [cause.message for cause in causes]
    unusual = [
        output.type is not None or output.headers or message.headers or not output.topic
        for output, message in zip(outputs, messages, strict=True)
    ]
    if any(unusual):
        return list(map(encode, outputs, causes, places))
    columns = zip(
        [message.offset for message in messages],
        [output.topic for output in outputs],
        [key.encode() if type(key) is str else _bytes("key", key) for key in [output.key for output in outputs]],
        [
            orjson.dumps(value, default=_plain) if type(value) is dict else _value(value)
            for value in [output.value for output in outputs]
        ],
        [message.id for message in messages],
        places,
        [f"{cause.key.hex()}-{place}" for cause, place in zip(causes, places, strict=True)],  # as message_id does
        repeat(None),
    )
    return list(map(_outgoing, columns))


# What Outgoing._make does, without leaving C for each of them.
_outgoing: Callable[[Iterable[Any]], Outgoing] = partial(tuple.__new__, Outgoing)


def message_id(cause_key: bytes, index: int) -> str:
    """Never change this: a re-send by a newer version must carry the same id."""
    return f"{cause_key.hex()}-{index}"


def _extra(output: Output, cause: Message[Any]) -> Headers | None:
    """Headers that do not follow from the cause's id; they win over those that do."""
    extra: dict[str, bytes | None] = {}
    for name in (CORRELATION_ID, TRACEPARENT):
        passed_on = cause.header(name)
        if passed_on:
            extra[name] = passed_on
    if output.type is not None:
        extra[TYPE] = output.type.encode()
    for name, value in (output.headers or {}).items():
        extra[name] = _bytes(f"header {name!r}", value)
    return tuple(extra.items()) or None


def dump_json(value: Any) -> bytes:
    return orjson.dumps(value, default=_plain)


def pack(outputs: Sequence[Outgoing]) -> bytes | None:
    """None for no outputs: the ledger has nothing to keep."""
    if not outputs:
        return None
    topics: dict[str, int] = {}
    rows = []
    body: list[bytes] = []
    for source, topic, key, value, cause_id, index, _, extra in outputs:
        rows.append(
            (
                source,
                topics.setdefault(topic, len(topics)),
                -1 if key is None else len(key),
                -1 if value is None else len(value),
                cause_id,
                index,
                [(name, -1 if text is None else len(text)) for name, text in extra] if extra else None,
            )
        )
        body += (key or b"", value or b"")
        if extra:
            body += [text or b"" for _, text in extra]
    head = orjson.dumps({"format": _FORMAT, "topics": list(topics), "rows": rows})
    return b"".join((len(head).to_bytes(4, "big"), head, *body))


def unpack(blob: bytes | None, key_of: Callable[[str], bytes]) -> list[Outgoing]:
    """`key_of` gives the inbox key of a message id."""
    if blob is None:
        return []
    start = 4 + int.from_bytes(blob[:4], "big")
    head = orjson.loads(blob[4:start])
    if head["format"] != _FORMAT:
        raise ValueError(f"ledger outputs have format {head['format']}, this version reads {_FORMAT}")
    topics = head["topics"]
    cursor = start

    def take(length: int) -> bytes | None:
        nonlocal cursor
        if length < 0:
            return None
        cursor += length
        return blob[cursor - length : cursor]

    # The order of these calls is the order in which `pack` adds to the body.
    return [
        Outgoing(
            source,
            topics[topic],
            take(key),
            take(value),
            cause_id,
            index,
            None if index == DEAD_LETTER else message_id(key_of(cause_id), index),
            tuple((name, take(length)) for name, length in extra) if extra else None,
        )
        for source, topic, key, value, cause_id, index, extra in head["rows"]
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
