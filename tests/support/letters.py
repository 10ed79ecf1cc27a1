"""Dead letters, taken apart as an operator's tool would: the record as it came, and the notes that were added."""

from __future__ import annotations

from dataclasses import dataclass

from tests.support.reading import Headers, headers_of, read_all

NOTE = "dlq-"


@dataclass(frozen=True)
class Letter:
    key: bytes | None
    value: bytes | None
    headers: Headers  # the original ones, in their order
    notes: dict[str, str]  # without their prefix


def read(bootstrap_servers: str, topic: str) -> list[Letter]:
    """All dead letters that a reader of committed data sees."""
    letters = []
    for message in read_all(bootstrap_servers, topic):
        headers = headers_of(message)
        first_note = next(index for index, (name, _) in enumerate(headers) if name.startswith(NOTE))
        notes = {name.removeprefix(NOTE): (value or b"").decode() for name, value in headers[first_note:]}
        assert len(notes) == len(headers) - first_note, f"a note is there twice: {headers}"
        assert all(name.startswith(NOTE) for name, _ in headers[first_note:]), f"the notes come last: {headers}"
        letters.append(Letter(_bytes(message.key()), _bytes(message.value()), headers[:first_note], notes))
    return letters


def _bytes(value: str | bytes | None) -> bytes | None:
    assert not isinstance(value, str)
    return value
