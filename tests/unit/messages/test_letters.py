"""A dead letter is the original, byte for byte, with what went wrong said after it; and Kafka always takes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from processor import Message
from processor.messages import identity, letters, outputs, stored
from processor.messages.failure import Failure
from processor.messages.message import Headers
from processor.messages.outputs import EncodedOutputs, Outgoing
from processor.messages.record import Record
from tests.support.readings import reading

KEY = identity.inbox_key("inventory")
FIRST = datetime(2026, 1, 2, 3, 4, 5, 678900, UTC)
LAST = datetime(2026, 1, 2, 5, 0, 0, tzinfo=timezone(timedelta(hours=1)))
# Whatever a producer may send: a name twice, no value, no text, names that look like ours.
HEADERS: Headers = [
    ("a", b"1"),
    ("ü", b"\xff\x00"),
    ("a", None),
    ("dlq-reason", b"old"),
    ("message-id", b""),
    ("a", b"1"),
]
FAILURE = Failure("constraint", "amount: must be positive", "Traceback …", "bug", "CheckViolation", "23514")
DIAGNOSIS = [
    ("dlq-consumer", b"inventory"),
    ("dlq-version", b"1.2.3"),
    ("dlq-topic", b"orders"),
    ("dlq-partition", b"3"),
    ("dlq-offset", b"41"),
    ("dlq-timestamp", b"1700000000123"),
    ("dlq-message-id", "ü1".encode()),
    ("dlq-type", b"Placed"),
    ("dlq-class", b"bug"),
    ("dlq-reason", b"constraint"),
    ("dlq-error", b"amount: must be positive"),
    ("dlq-exception", b"CheckViolation"),
    ("dlq-sqlstate", b"23514"),
    ("dlq-attempts", b"3"),
    ("dlq-first-failure", b"2026-01-02T03:04:05.678+00:00"),
    ("dlq-last-failure", b"2026-01-02T04:00:00.000+00:00"),
]
OMITTED = b"omitted: in the inbox row"
ROOMY = 1_000_000


def failed(
    payload: bytes | None = b'{"amount": -1}\x00\xff',
    key: bytes | None = b"k\x00",
    headers: Headers = HEADERS,
    failure: Failure = FAILURE,
    **changes: Any,
) -> Record:
    fields: dict[str, Any] = {"type": "Placed", "timestamp_ms": 1_700_000_000_123, **changes}
    message: Message[Any] = Message(
        "ü1", fields["type"], key, {"decoded": 1}, headers, "orders", 3, 41, fields["timestamp_ms"]
    )
    return Record(
        message,
        KEY(message.id),
        payload,
        0,
        0,
        None,
        True,
        failure,
        reading(3),
        attempts=fields.get("attempts", 2),
        first_failed_at=fields.get("first_failed_at", FIRST),
    )


def letter(record: Record, max_bytes: int = ROOMY) -> Outgoing:
    return letters.letter(record, "orders.inventory.dlq", "inventory", "1.2.3", LAST, max_bytes)


def test_letter_is_the_original_with_the_diagnosis_after_it() -> None:
    found = letter(failed())
    assert found.topic == "orders.inventory.dlq"
    assert found.key == b"k\x00"
    assert found.value == b'{"amount": -1}\x00\xff'
    assert found.source_offset == 41
    assert found.cause_id == "ü1"
    assert found.id is None
    assert found.place == outputs.DEAD_LETTER
    assert found.headers() == [*HEADERS, *DIAGNOSIS]


def test_what_is_not_known_has_no_header() -> None:
    record = failed(failure=Failure("not_json", "no"), type=None, timestamp_ms=None, headers=())
    absent = {"dlq-type", "dlq-timestamp", "dlq-exception", "dlq-sqlstate"}
    assert [name for name, _ in letter(record).headers()] == [name for name, _ in DIAGNOSIS if name not in absent]


def test_first_failure_of_all_is_first_and_last() -> None:
    found = dict(letter(failed(attempts=0, first_failed_at=None)).headers())
    assert found["dlq-attempts"] == b"1"
    assert found["dlq-first-failure"] == found["dlq-last-failure"] == b"2026-01-02T04:00:00.000+00:00"


def test_timestamp_of_the_epoch_is_a_timestamp() -> None:
    assert dict(letter(failed(timestamp_ms=0)).headers())["dlq-timestamp"] == b"0"


def test_text_of_an_error_is_cut_by_the_character_and_always_encodable() -> None:
    long = dict(letter(failed(failure=Failure("r", "ü" * 1001))).headers())
    assert long["dlq-error"] == ("ü" * 1000).encode()
    odd = dict(letter(failed(failure=Failure("r", "half \ud800", exception="E\udfff"))).headers())
    assert odd["dlq-error"] == b"half \\ud800"
    assert odd["dlq-exception"] == b"E\\udfff"


@pytest.mark.parametrize("key", [None, b""])
@pytest.mark.parametrize("payload", [None, b""])
def test_nothing_and_empty_stay_what_they_are(key: bytes | None, payload: bytes | None) -> None:
    found = letter(failed(payload, key))
    assert (found.key, found.value) == (key, payload)
    assert found.headers() == [*HEADERS, *DIAGNOSIS]


def test_letter_that_just_fits_is_whole_and_one_byte_less_leaves_out_the_payload() -> None:
    record = failed(b"x" * 5000)
    whole = letter(record)
    assert letter(record, whole.size()) == whole
    short = letter(record, whole.size() - 1)
    assert short.value is None
    assert short.key == whole.key
    assert short.headers() == [*HEADERS, *DIAGNOSIS, ("dlq-payload", OMITTED)]


def test_headers_too_large_are_left_out_after_the_payload() -> None:
    found = letter(failed(headers=[("large", b"x" * 5000)]), 5000)
    assert found.value is None
    assert found.key == b"k\x00"
    assert found.headers() == [*DIAGNOSIS, ("dlq-payload", OMITTED), ("dlq-headers", OMITTED)]


def test_key_too_large_is_left_out_last() -> None:
    found = letter(failed(key=b"x" * 5000), 5000)
    assert (found.key, found.value) == (None, None)
    assert found.headers() == [
        *DIAGNOSIS,
        ("dlq-payload", OMITTED),
        ("dlq-headers", OMITTED),
        ("dlq-key", OMITTED),
    ]
    assert found.size() <= 5000


def test_what_was_not_there_is_not_said_to_be_left_out() -> None:
    found = letter(failed(None, headers=[("large", b"x" * 5000)]), 5000)
    assert found.headers() == [*DIAGNOSIS, ("dlq-headers", OMITTED)]
    assert letter(failed(None, None, ()), 10).headers() == DIAGNOSIS


def test_letter_comes_out_of_the_ledger_as_it_went_in() -> None:
    sent = [letter(failed()), letter(failed(b"x" * 5000), 2000), letter(failed(None, None, ()))]
    blob = stored.pack(EncodedOutputs.of(sent))
    assert blob is not None
    kept = list(stored.unpack(blob, KEY))
    assert kept == sent
    assert [found.headers() for found in kept] == [found.headers() for found in sent]
