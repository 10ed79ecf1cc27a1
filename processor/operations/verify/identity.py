"""Which message a record is, by the rules that docs/configuration.md states under `[message]`.

Written again on purpose: the audit must not repeat a mistake of `messages/identity.py` or `messages/decode.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import orjson

if TYPE_CHECKING:
    from processor.settings.schema import Settings

REDRIVE = "processor-redrive"
LONGEST_ID = 512
LONGEST_REDRIVEN_ID = 1024
KEY_BYTES = 16
NO_TIMESTAMP = 0

Headers: TypeAlias = Mapping[str, bytes | None]
Rule: TypeAlias = "Callable[[View], str | None]"


class Raw(Protocol):
    """What is needed of a record as the client library gives it."""

    def value(self) -> Any: ...
    def key(self) -> Any: ...
    def headers(self) -> Any: ...
    def offset(self) -> int | None: ...
    def timestamp(self) -> tuple[int, int]: ...


class Kind(IntEnum):
    """What a record is to the inbox."""

    USUAL = 0  # it has a row under its id
    REDRIVEN = 1  # so it has, and an operator sent it again
    WITHOUT_INBOX = 2  # its type has `inbox = false`
    FOREIGN = 3  # sent again for another consumer


class View:
    """A record, and what was found out about it."""

    __slots__ = ("_document", "headers", "place", "raw", "type", "value")

    def __init__(self, raw: Raw, place: str, *, readable: bool) -> None:
        self.raw = raw
        self.place = place
        self.value: bytes | None = raw.value()
        self.headers = headers_of(raw)
        self.type: str | None = None
        self._document: Any = _UNREAD if readable else None

    def document(self) -> Any:
        if self._document is _UNREAD:
            self._document = None if self.value is None else _parsed(self.value)
        return self._document


class Identity:
    """Names the records of a deployment."""

    def __init__(self, settings: Settings) -> None:
        message = settings.message
        self._consumer = settings.consumer
        self._most_bytes = message.max_bytes
        self._ids = [_rule(text) for text in message.id]
        self._types = [_rule(text) for text in message.type]
        self._scoped = message.scope_by_type
        self._window = message.window_seconds
        self._handlers = {name: handler.inbox for name, handler in settings.handlers.items()}
        self.all_in_inbox = all(self._handlers.values())
        templates = [text for text in message.id if text.startswith("business:")]
        self._needs_type = self._scoped or not self.all_in_inbox or any("{type}" in text for text in templates)

    def name(self, raw: Raw, place: str) -> tuple[str, Kind]:
        """Return the id under which the inbox knows this record; `place` is `topic:topic id:partition:offset`."""
        value = raw.value()
        oversized = value is not None and len(value) > self._most_bytes
        view = View(raw, place, readable=not oversized)
        if REDRIVE in view.headers:
            return self._redriven(view)
        if self._needs_type:
            view.type = self._type(view)
        id_ = _first(self._ids, view)
        if id_ and self._scoped:
            id_ = f"{view.type or ''}:{id_}"
        if id_ and self._window:
            kind, timestamp = raw.timestamp()
            begin = timestamp // (self._window * 1000) * self._window
            id_ = None if kind == NO_TIMESTAMP else f"{id_}@{begin}"
        if not id_ or not _storable(id_, LONGEST_ID):
            id_ = place
        in_inbox = self.all_in_inbox or oversized or self._handlers.get(view.type or "", self._handlers.get("*", True))
        return id_, Kind.USUAL if in_inbox else Kind.WITHOUT_INBOX

    def _redriven(self, view: View) -> tuple[str, Kind]:
        consumer, colon, id_ = (_text(view.headers[REDRIVE]) or "").partition(":")
        if colon and consumer != self._consumer:
            return view.place, Kind.FOREIGN
        return (id_ if id_ and _storable(id_, LONGEST_REDRIVEN_ID) else view.place), Kind.REDRIVEN

    def _type(self, view: View) -> str | None:
        found = _first(self._types, view)
        if found is not None and not _storable(found, LONGEST_ID):
            return found.replace("\0", "\\0")[:LONGEST_ID]
        return found


def keys(consumer: str) -> Callable[[bytes], bytes]:
    """Return the function from a message id to its key in the inbox: `inbox_key` of the first migration."""
    begun = hashlib.sha256(consumer.encode() + b":")

    def key(id_: bytes) -> bytes:
        digest = begun.copy()
        digest.update(id_)
        return digest.digest()[:KEY_BYTES]

    return key


def headers_of(raw: Raw) -> Headers:
    """Return the headers, of several with one name the last; none if the client cannot read them."""
    try:
        return dict(raw.headers() or ())
    except Exception:  # a header name is not UTF-8
        return {}


_UNREAD: Any = object()
_LONG_NUMBER = re.compile(rb"[0-9]{19}")


def _parsed(value: bytes) -> Any:
    """Return the value as JSON; None if it is none, or holds a number that 64 bits, or a double, cannot hold."""
    try:
        document = orjson.loads(value)
        if _LONG_NUMBER.search(value):
            json.loads(value, parse_int=_integer, parse_float=_fraction)
    except (ValueError, RecursionError):
        return None
    return document


def _integer(digits: str) -> int:
    if len(digits) > len(str(-(2**64))) or not -(2**63) <= int(digits) < 2**64:
        raise ValueError(digits)
    return 0


def _fraction(digits: str) -> float:
    if math.isinf(float(digits)):
        raise ValueError(digits)
    return 0.0


def _first(rules: Sequence[Rule], view: View) -> str | None:
    for rule in rules:
        if found := rule(view):
            return found
    return None


def _storable(text: str, most: int) -> bool:
    return len(text) <= most and "\0" not in text


def _rule(specification: str) -> Rule:
    kind, _, rest = specification.partition(":")
    match kind:
        case "header":
            return lambda view: _text(view.headers.get(rest))
        case "payload":
            steps = [step.replace("~1", "/").replace("~0", "~") for step in rest[1:].split("/")]
            return lambda view: _name(_followed(view.document(), steps))
        case "business":
            return lambda view: _filled(rest, view)
        case "content-hash":
            return lambda view: None if view.value is None else hashlib.sha256(view.value).hexdigest()
        case "offset":
            return lambda view: view.place
        case "constant":
            return lambda view: rest
    raise ValueError(specification)


def _filled(template: str, view: View) -> str | None:
    missing = False

    def field(match: re.Match[str]) -> str:
        nonlocal missing
        found = _name(_followed(view.document(), [match[1]]))
        if not found and match[1] == "type":
            found = view.type
        elif not found and match[1] == "key":
            found = _text(view.raw.key())
        missing = missing or not found
        return found or ""

    text = re.sub(r"\{([^{}]+)\}", field, template)
    return None if missing else text


def _followed(document: Any, steps: Sequence[str]) -> Any:
    for step in steps:
        if isinstance(document, dict):
            document = document.get(step)
        elif isinstance(document, list) and step.isdigit() and int(step) < len(document):
            document = document[int(step)]
        else:
            return None
    return document


def _name(value: Any) -> str | None:
    """A text or a number names something; nothing else does."""
    if isinstance(value, str):
        return value
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _text(value: bytes | None) -> str | None:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return None
