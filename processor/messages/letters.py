"""The record that a dead-letter topic gets for a message that failed for good. Pure.

Key, value and headers are the original's, byte for byte; the diagnosis follows in headers after
those. The inbox row has all of this and more. So a part that would make the record too large for
Kafka is left out, and a header says so: a failure must never go unreported.
"""

from __future__ import annotations

from datetime import UTC, datetime

from processor.messages.failure import Failure
from processor.messages.outputs import DEAD_LETTER, Outgoing
from processor.messages.record import Record

MAX_ERROR_CHARS = 1000
OMITTED = b"omitted: in the inbox row"


def letter(record: Record, topic: str, consumer: str, version: str, failed_at: datetime, max_bytes: int) -> Outgoing:
    """Return the dead letter of a record with a failure; parts are omitted while its `size` exceeds `max_bytes`."""
    assert record.failure is not None
    message = record.message
    diagnosis = _diagnosis(record, record.failure, consumer, version, failed_at)
    key, value, original = message.key, record.payload, message.headers
    while True:
        headers = (*original, *diagnosis)
        made = Outgoing(message.offset, topic, key, value, message.id, DEAD_LETTER, None, headers)
        if made.size() <= max_bytes:
            return made
        if value is not None:
            value = None
            diagnosis.append(("dlq-payload", OMITTED))
        elif original:
            original = ()
            diagnosis.append(("dlq-headers", OMITTED))
        elif key is not None:
            key = None
            diagnosis.append(("dlq-key", OMITTED))
        else:
            return made


def _diagnosis(
    record: Record, failure: Failure, consumer: str, version: str, failed_at: datetime
) -> list[tuple[str, bytes | None]]:
    message = record.message
    texts = {
        "dlq-consumer": consumer,
        "dlq-version": version,
        "dlq-topic": message.topic,
        "dlq-partition": message.partition,
        "dlq-offset": message.offset,
        "dlq-timestamp": message.timestamp_ms,
        "dlq-message-id": message.id,
        "dlq-type": message.type,
        "dlq-class": failure.kind,
        "dlq-reason": failure.reason,
        "dlq-error": failure.detail[:MAX_ERROR_CHARS],
        "dlq-exception": failure.exception,
        "dlq-sqlstate": failure.sqlstate,
        "dlq-attempts": record.attempts + 1,
        "dlq-first-failure": _iso(record.first_failed_at or failed_at),
        "dlq-last-failure": _iso(failed_at),
    }
    # An exception's text may hold half a surrogate pair, which has no UTF-8 form.
    return [(name, str(text).encode(errors="backslashreplace")) for name, text in texts.items() if text is not None]


def _iso(at: datetime) -> str:
    return at.astimezone(UTC).isoformat(timespec="milliseconds")
