"""The JSON form in which the inbox keeps headers and errors; only this module writes and reads it. Pure."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from processor.messages.failure import Failure
    from processor.messages.message import Headers


def dump_headers(headers: Headers) -> str:
    """Write headers as text where they are UTF-8, as base64 where they are not: every byte can be restored."""
    return orjson.dumps([[name, dump_value(value)] for name, value in headers]).decode()


def load_headers(text: str | None) -> list[tuple[str, bytes | None]]:
    """Return the headers as they came, byte for byte; none if the row keeps no record."""
    return [(name, _load_value(value)) for name, value in orjson.loads(text or "[]")]


def dump_error(failure: Failure) -> str:
    fields = {
        "class": failure.kind,
        "reason": failure.reason,
        "message": failure.detail,
        "exception": failure.exception,
        "sqlstate": failure.sqlstate,
        "traceback": failure.traceback,
    }
    return orjson.dumps(fields, default=str).decode()


def load_error(text: str | None) -> dict[str, Any] | None:
    found: dict[str, Any] | None = orjson.loads(text) if text else None
    return found


def dump_value(value: bytes | None) -> str | dict[str, str] | None:
    """Write bytes as text if they are UTF-8, else as base64."""
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


def _load_value(value: Any) -> bytes | None:
    if isinstance(value, dict):
        return base64.b64decode(value["base64"])
    return None if value is None else str(value).encode()
