"""The audit names records by code of its own, and by the same rules as the processor."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from processor.messages import identity as processors
from processor.messages.decode import REDRIVE, Decoder
from processor.messages.incoming import checksum_of
from processor.messages.message import Headers
from processor.messages.types import MessageType, MessageTypes
from processor.operations.verify import inputs
from processor.operations.verify.identity import Identity, Kind, keys
from processor.settings.schema import HandlerSettings, MessageSettings, Settings
from tests.support.readings import reading

PLACE = "orders::0:5"
HANDLERS = {"T": True, "W": False, "*": True}


@dataclass
class Raw:
    """A record as the client library gives it."""

    bytes_: bytes | None = b"{}"
    key_: bytes | None = b"k"
    headers_: Headers = field(default_factory=list)
    time: tuple[int, int] = (1, 1_700_000_000_123)

    def value(self) -> bytes | None:
        return self.bytes_

    def key(self) -> bytes | None:
        return self.key_

    def headers(self) -> Headers | None:
        if self.headers_ == [("broken", b"")]:
            raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "as librdkafka's binding does")
        return self.headers_

    def offset(self) -> int:
        return 5

    def timestamp(self) -> tuple[int, int]:
        return self.time


VALUES = [
    b'{"id": "a", "type": "T", "n": {"m~/": ["x", {"deep": 7}]}}',
    b'{"id": "", "type": "W"}',
    b'{"id": 7, "type": 3.50}',
    b'{"id": 1e400}',
    b'{"id": 18446744073709551615}',
    b'{"id": 18446744073709551616}',
    b'{"id": -9223372036854775808, "x": "99999999999999999999999"}',
    b'{"id": "a", "x": 99999999999999999999999}',
    b'{"id": 0.1000000000000000055511151231257827}',
    b'{"id": true, "type": null}',
    b'{"id": ["a"], "type": {"T": 1}}',
    '{"id": "ü\\u0000", "type": "\\u0000T"}'.encode(),
    b'{"id": "' + b"x" * 512 + b'"}',
    b'{"id": "' + b"x" * 513 + b'", "type": "' + b"t" * 600 + b'"}',
    b'{"id": "a", "id": "b"}',
    b'{"key": "k2", "order.id": "dotted", "type": "business"}',
    b"[1, 2, 3]",
    b'["zero"]',
    b"7",
    b'"text"',
    b"null",
    b"NaN",
    b"{",
    b"",
    b"\xff",
    b"[" * 3000,
    b'{"id": "large", "pad": "' + b"y" * 2000 + b'"}',
    None,
]
HEADERS: list[Headers] = [
    [],
    [("message-id", b"h"), ("type", b"T")],
    [("message-id", b"first"), ("message-id", b"last"), ("type", b"W")],
    [("message-id", b"first"), ("message-id", None)],
    [("message-id", b""), ("type", b"")],
    [("message-id", b"\xff"), ("type", b"\xff")],
    [("message-id", b"nul\0")],
    [("broken", b"")],
    [(REDRIVE, b"c:again"), ("type", b"W")],
    [(REDRIVE, b"c:a:b")],
    [(REDRIVE, b"another:again")],
    [(REDRIVE, b"no colon")],
    [(REDRIVE, b"c")],
    [(REDRIVE, b"c:")],
    [(REDRIVE, b"c:" + b"x" * 1024)],
    [(REDRIVE, b"c:" + b"x" * 1025)],
    [(REDRIVE, None)],
]
CHAINS: list[dict[str, Any]] = [
    {},
    {"id": ("header:message-id", "payload:/id")},
    {"id": ("payload:/n/m~0~1/1/deep", "payload:/1", "payload:/id", "header:message-id")},
    {"id": ("payload:/id", "content-hash")},
    {"id": ("business:{type}-{key}-{id}", "business:{order.id}", "offset")},
    {"id": ("payload:/id", "offset"), "scope_by_type": True},
    {"id": ("payload:/id",), "type": ("payload:/type", "constant:W"), "scope_by_type": True, "window_seconds": 60},
    {"id": ("header:message-id", "content-hash"), "window_seconds": 7},
]
TIMES = [(1, 1_700_000_000_123), (1, -5), (0, -1)]


@pytest.mark.parametrize("chain", CHAINS, ids=str)
def test_the_same_id_as_the_processor_whatever_a_producer_sends(chain: dict[str, Any]) -> None:
    message = MessageSettings(max_bytes=1500, **{"id": ("header:message-id", "offset")} | chain)
    handlers = {name: HandlerSettings(call="a:b", inbox=inbox) for name, inbox in HANDLERS.items()}
    settings = Settings.model_construct(consumer="c", message=message, handlers=handlers)
    types = {name: MessageType(name, "h", lambda _: None, lambda _: None, inbox) for name, inbox in HANDLERS.items()}
    decoder, identity = Decoder(settings, MessageTypes(types)), Identity(settings)
    compared = 0
    for value in VALUES:
        for headers in HEADERS:
            for key in (b"k", None, b"\xff"):
                for time in TIMES:
                    raw = Raw(value, key, headers, time)
                    (span,) = decoder.decode_all([raw], reading())
                    (record,) = span.rows()
                    id_, kind = identity.name(raw, PLACE)
                    assert id_ == record.message.id, (value, headers, time)
                    assert (kind in (Kind.USUAL, Kind.REDRIVEN)) is record.in_inbox, (value, headers)
                    assert (kind is Kind.FOREIGN) is record.not_ours
                    assert (kind is Kind.REDRIVEN) is (record.redriven and not record.not_ours)
                    assert keys("c")(id_.encode()) == record.key
                    compared += 1
    assert compared == len(VALUES) * len(HEADERS) * 9


def test_the_same_key_and_checksum_as_the_processor() -> None:
    for id_ in ("", "a", "ü", "x:y"):
        assert keys("c.d")(id_.encode()) == processors.inbox_key("c.d")(id_)
    for value in (b"", b"a", b"abc" * 100, bytes(range(256))):
        assert inputs.checksum(value) == checksum_of(value)
    assert checksum_of(None) == inputs.checksum(None)
