"""What makes two records the same message: an ordered chain of strategies, of which the first that yields a value wins.

    header:NAME            the last header of that name, as UTF-8
    payload:/json/pointer  a text or number inside the JSON value (RFC 6901)
    business:TEMPLATE      such as order:{order_id}:{type}; every field must be there
    content-hash           SHA-256 of the value; a delete marker has none
    offset                 topic:topic id:partition:offset; a recreated topic has another topic id
    constant:NAME          for types only

Pure: no client, no clock. An id may be scoped by type and by a window of the record's timestamp.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from processor.messages.message import last_header, place

if TYPE_CHECKING:
    from processor.messages.incoming import Incoming, RawColumns
    from processor.settings.schema import MessageSettings

# An id or a type, or None where the strategy yields nothing.
Found = str | None


class Strategy(Protocol):
    """One way to name a record; `column` names many at once and returns None if it cannot."""

    def one(self, incoming: Incoming, type_: str | None) -> Found: ...

    def column(self, columns: RawColumns) -> Sequence[Found] | None: ...


KEY_BYTES = 16

_FIELD = re.compile(r"\{([^{}]+)\}")


def compile_chain(specifications: Sequence[str]) -> Strategy:
    chain = [_compile(specification) for specification in specifications]
    return chain[0] if len(chain) == 1 else _Chain(chain)


class _Chain:
    def __init__(self, chain: Sequence[Strategy]) -> None:
        self._chain = chain

    def one(self, incoming: Incoming, type_: str | None) -> Found:
        for strategy in self._chain:
            found = strategy.one(incoming, type_)
            if found:
                return found
        return None

    def column(self, columns: RawColumns) -> Sequence[Found] | None:
        found: Sequence[Found] | None = None
        for strategy in self._chain:
            column = strategy.column(columns)
            if column is None:
                return None
            if found is None or not any(found):
                found = column
            else:
                found = [before or now for before, now in zip(found, column, strict=True)]
            if all(found):
                break
        return found


def inbox_key(consumer: str) -> Callable[[str], bytes]:
    """Return the function that makes the inbox key of a message id."""
    keys = inbox_keys(consumer)
    return lambda message_id: keys([message_id])[0]


def inbox_keys(consumer: str) -> Callable[[Sequence[str]], list[bytes]]:
    """Return the function that makes the keys of many ids. Never change it: `inbox_key` in the database must agree."""
    prefix = hashlib.sha256(f"{consumer}:".encode())

    def keys(message_ids: Sequence[str]) -> list[bytes]:
        found = []
        for id_ in message_ids:
            digest = prefix.copy()  # a fifth faster than a new digest
            digest.update(id_.encode())
            found.append(digest.digest()[:KEY_BYTES])
        return found

    return keys


def scope(settings: MessageSettings) -> Callable[[str, str | None, int | None], str | None] | None:
    """Return the function that narrows an id to its type and time window, or None if there is nothing to narrow.

    The function returns None for a record without a timestamp where a window is set.
    """
    if not settings.scope_by_type and not settings.window_seconds:
        return None
    window_ms = settings.window_seconds * 1000 if settings.window_seconds else None

    def scoped(id_: str, type_: str | None, timestamp_ms: int | None) -> str | None:
        if settings.scope_by_type:
            id_ = f"{type_ or ''}:{id_}"
        if window_ms is not None:
            if timestamp_ms is None:
                return None
            id_ = f"{id_}@{timestamp_ms // window_ms * settings.window_seconds}"  # type: ignore[operator]
        return id_

    return scoped


def pointer(path: str) -> Callable[[Any], Any]:
    """Return a function that follows a JSON pointer and returns None where it leads nowhere."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in path.split("/")[1:]]

    def follow(document: Any) -> Any:
        for step in steps:
            if isinstance(document, dict):
                document = document.get(step)
            elif isinstance(document, list) and step.isdigit() and int(step) < len(document):
                document = document[int(step)]
            else:
                return None
        return document

    return follow


def _compile(specification: str) -> Strategy:
    kind, _, argument = specification.partition(":")
    match kind:
        case "header":
            return _Header(argument)
        case "payload":
            return _Payload(argument)
        case "business":
            return _Business(argument)
        case "content-hash":
            return _ContentHash()
        case "offset":
            return _Offset()
        case "constant":
            return _Constant(argument)
    raise ValueError(specification)


class _Header:
    def __init__(self, name: str) -> None:
        self._name = name

    def one(self, incoming: Incoming, _type: str | None) -> Found:
        return _text_of(last_header(incoming.headers, self._name))

    def column(self, columns: RawColumns) -> Sequence[Found]:
        name = self._name
        return [_text_of(last_header(headers, name)) if headers else None for headers in columns.headers]


class _Payload:
    def __init__(self, path: str) -> None:
        self._follow = pointer(path)
        self._name = path[1:]
        self._nested = "/" in path[1:] or "~" in path

    def one(self, incoming: Incoming, _type: str | None) -> Found:
        return _scalar(self._follow(incoming.document()))

    def column(self, columns: RawColumns) -> Sequence[Found] | None:
        documents = columns.documents()
        if documents is None:
            return None
        if not self._nested:
            name = self._name
            try:
                found = [document[name] for document in documents]
            except (KeyError, TypeError, IndexError):
                pass  # a document lacks the field or is not an object
            else:
                if set(map(type, found)) == {str}:
                    return found
        return [_scalar(self._follow(document)) for document in documents]


class _ContentHash:
    def one(self, incoming: Incoming, _type: str | None) -> Found:
        return None if incoming.value is None else hashlib.sha256(incoming.value).hexdigest()

    def column(self, columns: RawColumns) -> Sequence[Found]:
        return [hashlib.sha256(value).hexdigest() for value in columns.values]


class _Offset:
    def one(self, incoming: Incoming, _type: str | None) -> Found:
        return place(incoming.topic, incoming.topic_id, incoming.partition, incoming.offset)

    def column(self, columns: RawColumns) -> Sequence[Found]:
        prefix = place(columns.partition.topic, columns.topic_id, columns.partition.number, "")
        return [f"{prefix}{offset}" for offset in columns.offsets]


class _Constant:
    def __init__(self, name: str) -> None:
        self._name = name

    def one(self, _incoming: Incoming, _type: str | None) -> Found:
        return self._name

    def column(self, columns: RawColumns) -> Sequence[Found]:
        return [self._name] * len(columns.values)


class _Business:
    def __init__(self, template: str) -> None:
        self._parts = _FIELD.split(template)  # text, field, text, field, …, text
        self._follow = {name: pointer(name if name.startswith("/") else f"/{name}") for name in self._parts[1::2]}

    def one(self, incoming: Incoming, type_: str | None) -> Found:
        filled = list(self._parts)
        for index in range(1, len(filled), 2):
            name = filled[index]
            found = _scalar(self._follow[name](incoming.document()))
            if not found and name == "type":
                found = type_
            elif not found and name == "key":
                found = _text_of(incoming.key)
            if not found:
                return None
            filled[index] = found
        return "".join(filled)

    def column(self, _columns: RawColumns) -> None:
        return None  # it needs the type and the key of each record


def _scalar(value: Any) -> Found:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return str(value)


def _text_of(value: bytes | None) -> Found:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
