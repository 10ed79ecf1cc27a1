"""What makes two records the same message: an ordered chain of strategies, the first that yields wins.

    header:NAME            the last header of that name, as UTF-8
    payload:/json/pointer  a text or number inside the JSON value (RFC 6901)
    business:TEMPLATE      such as order:{order_id}:{type}; every field must be there
    content-hash           SHA-256 of the value; a delete marker has none
    offset                 topic:partition:offset
    constant:NAME          for types only

Pure: no client, no clock. An id may be scoped by type and by a window of the record's timestamp.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from processor.config import MessageSettings
    from processor.decode import Incoming

Strategy = Callable[["Incoming", str | None], str | None]

_FIELD = re.compile(r"\{([^{}]+)\}")


def compile_chain(specifications: Sequence[str]) -> list[Strategy]:
    return [_compile(specification) for specification in specifications]


def first(chain: Sequence[Strategy], incoming: Incoming, type_: str | None) -> str | None:
    for strategy in chain:
        found = strategy(incoming, type_)
        if found:
            return found
    return None


def scope(settings: MessageSettings) -> Callable[[str, str | None, int | None], str | None]:
    """Narrow an id to its type and time window; None where the window asks for a timestamp that is missing."""
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
    """A function that follows a JSON pointer, giving None where it leads nowhere."""
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
            return lambda incoming, _type: _text_of(incoming.header(argument))
        case "payload":
            follow = pointer(argument)
            return lambda incoming, _type: _scalar(follow(incoming.document()))
        case "business":
            return _template(argument)
        case "content-hash":
            return lambda incoming, _type: (
                None if incoming.value is None else hashlib.sha256(incoming.value).hexdigest()
            )
        case "offset":
            return lambda incoming, _type: f"{incoming.topic}:{incoming.partition}:{incoming.offset}"
        case "constant":
            return lambda _incoming, _type: argument
    raise ValueError(specification)


def _template(template: str) -> Strategy:
    parts = _FIELD.split(template)  # text, field, text, field, …, text
    follow = {name: pointer(name if name.startswith("/") else f"/{name}") for name in parts[1::2]}

    def fill(incoming: Incoming, type_: str | None) -> str | None:
        filled = list(parts)
        for index in range(1, len(parts), 2):
            name = parts[index]
            found = _scalar(follow[name](incoming.document()))
            if not found and name == "type":
                found = type_
            elif not found and name == "key":
                found = _text_of(incoming.key)
            if not found:
                return None
            filled[index] = found
        return "".join(filled)

    return fill


def _scalar(value: Any) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return str(value)


def _text_of(value: bytes | None) -> str | None:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return None
