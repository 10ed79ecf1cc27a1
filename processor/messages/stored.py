"""Outputs as the ledger keeps them until Kafka has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from processor.messages.message import Headers
from processor.messages.outputs import DEAD_LETTER, EncodedOutputs, message_id

_FORMAT = 2


def pack(outputs: EncodedOutputs) -> bytes | None:
    """Return the ledger's form of the outputs, or None without outputs: the ledger then has nothing to keep."""
    if not len(outputs):
        return None
    topics = list(dict.fromkeys(outputs.topics))
    numbers = {topic: number for number, topic in enumerate(topics)}
    head: dict[str, Any] = {
        "format": _FORMAT,
        "topics": topics,
        "offsets": outputs.offsets,
        "causes": outputs.causes,
        "keys": _lengths(outputs.keys),
        "values": _lengths(outputs.values),
    }
    body = [*outputs.keys, *outputs.values]
    # Usually the rest is the same for all outputs, and is left out.
    if len(topics) > 1:
        head["topic"] = [numbers[topic] for topic in outputs.topics]
    if any(outputs.places):
        head["places"] = outputs.places
    if any(outputs.extras):
        head["extras"] = [
            [(name, -1 if text is None else len(text)) for name, text in extra] if extra else None
            for extra in outputs.extras
        ]
        body += [text for extra in outputs.extras if extra for _, text in extra]
    if None in body:
        body = [part for part in body if part is not None]
    encoded = orjson.dumps(head)
    return b"".join((len(encoded).to_bytes(4, "big"), encoded, *body))  # type: ignore[arg-type]


def _lengths(column: list[bytes | None]) -> list[int]:
    return [-1 if part is None else len(part) for part in column] if None in column else list(map(len, column))  # type: ignore[arg-type]


def unpack(blob: bytes, key_of: Callable[[str], bytes]) -> EncodedOutputs:
    """Restore the outputs of a ledger row; `key_of` returns the inbox key of a message id."""
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

    # In the order in which `pack` adds to the body.
    keys, values = [take(length) for length in head["keys"]], [take(length) for length in head["values"]]
    count = len(keys)
    places = head.get("places") or [0] * count
    extras: list[Headers | None] = [
        tuple((name, take(length)) for name, length in extra) if extra else None
        for extra in head.get("extras") or [None] * count
    ]
    return EncodedOutputs(
        head["offsets"],
        [head["topics"][number] for number in head.get("topic") or [0] * count],
        keys,
        values,
        head["causes"],
        places,
        [
            None if place == DEAD_LETTER else message_id(key_of(cause), place)
            for cause, place in zip(head["causes"], places, strict=True)
        ],
        extras,
    )
