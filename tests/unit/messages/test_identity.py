"""Message identity: every strategy, the chain, scopes, null keys and null values."""

from __future__ import annotations

import hashlib
from typing import Any

import orjson
import pytest

from processor.messages import identity
from processor.messages.incoming import Incoming
from processor.settings.schema import MessageSettings


def incoming(
    value: Any = None,
    key: bytes | None = b"k",
    headers: list[tuple[str, bytes | None]] | None = None,
    timestamp_ms: int | None = 1_700_000_000_000,
) -> Incoming:
    payload = value if value is None or isinstance(value, bytes) else orjson.dumps(value)
    return Incoming("orders", 2, 41, timestamp_ms, key, payload, headers or [], "id1")


def id_of(chain: list[str], record: Incoming, type_: str | None = None) -> str | None:
    return identity.compile_chain(chain).one(record, type_)


def test_header_takes_the_last_of_that_name() -> None:
    record = incoming(headers=[("message-id", b"a"), ("other", b"x"), ("message-id", b"b")])
    assert id_of(["header:message-id"], record) == "b"


@pytest.mark.parametrize("value", [None, b"", b"\xff\xfe"])
def test_header_that_is_null_empty_or_not_utf8_does_not_yield(value: bytes | None) -> None:
    assert id_of(["header:message-id", "offset"], incoming(headers=[("message-id", value)])) == "orders:id1:2:41"


@pytest.mark.parametrize(
    ("pointer", "found"),
    [
        ("/event_id", "e1"),
        ("/nested/id", "7"),
        ("/list/1/id", "x"),
        ("/odd~1key", "slash"),
        ("/odd~0key", "tilde"),
        ("/ratio", "0.5"),
        ("/zero", "0"),
        ("/missing", None),
        ("/list/9", None),
        ("/list/x", None),
        ("/flag", None),
        ("/nothing", None),
        ("/nested", None),
        ("/event_id/deeper", None),
    ],
)
def test_payload_pointer_yields_texts_and_numbers_only(pointer: str, found: str | None) -> None:
    document = {
        "event_id": "e1",
        "nested": {"id": 7},
        "list": [1, {"id": "x"}],
        "odd/key": "slash",
        "odd~key": "tilde",
        "ratio": 0.5,
        "zero": 0,
        "flag": True,
        "nothing": None,
    }
    assert id_of([f"payload:{pointer}"], incoming(document)) == found


def test_business_template_needs_every_field() -> None:
    chain = ["business:order:{order_id}:{type}", "offset"]
    assert id_of(chain, incoming({"order_id": 5}), "OrderPlaced") == "order:5:OrderPlaced"
    assert id_of(chain, incoming({"order_id": 5, "type": "InPayload"}), "Header") == "order:5:InPayload"
    assert id_of(chain, incoming({"other": 5}), "OrderPlaced") == "orders:id1:2:41"
    assert id_of(chain, incoming({"order_id": 5}), None) == "orders:id1:2:41"
    assert id_of(["business:{key}/{/a/b}"], incoming({"a": {"b": "deep"}}, key=b"K")) == "K/deep"


def test_content_hash_is_sha256_of_the_value_and_a_delete_marker_has_none() -> None:
    assert id_of(["content-hash"], incoming(b"abc")) == hashlib.sha256(b"abc").hexdigest()
    assert id_of(["content-hash", "offset"], incoming(None)) == "orders:id1:2:41"


def test_null_value_and_null_key_fall_through_to_the_offset() -> None:
    chain = ["payload:/event_id", "business:{key}", "content-hash", "offset"]
    assert id_of(chain, incoming(None, key=None)) == "orders:id1:2:41"


def test_broken_json_does_not_yield_and_is_not_parsed_twice() -> None:
    record = incoming(b"{not json")
    assert id_of(["payload:/a", "payload:/b", "offset"], record) == "orders:id1:2:41"
    assert record.problem is not None
    assert record.problem.failure.reason == "not_json"


def test_nothing_yields_nothing() -> None:
    assert id_of(["header:message-id", "payload:/event_id"], incoming({"x": 1})) is None


def test_scope_by_type_and_window() -> None:
    assert identity.scope(MessageSettings()) is None, "nothing to narrow, so nobody need be asked"
    typed = identity.scope(MessageSettings(scope_by_type=True))
    assert typed is not None
    assert typed("a", "T", 1) != typed("a", "U", 1)
    windowed = identity.scope(MessageSettings(window_seconds=60))
    assert windowed is not None
    assert windowed("a", None, 60_000) == windowed("a", None, 119_999)
    assert windowed("a", None, 60_000) != windowed("a", None, 120_000)
    assert windowed("a", None, None) is None


def test_inbox_key_never_changes_between_versions() -> None:
    """Rows of years are known by it, and `inbox_key` in the database makes the same one."""
    key_of = identity.inbox_key("inventory")
    assert key_of("placed-4711").hex() == "2760052fb62d8b1e93bef6b61ae671bd"
    assert key_of("ü~orders:0:17").hex() == "ac36fd811c3330a4b1238e208642de2d"


def test_inbox_keys_of_other_messages_and_consumers_differ() -> None:
    assert len({identity.inbox_key(consumer)(id_) for consumer in "ab" for id_ in ("", "1", "2", "1 ")}) == 8
