"""Bytes and headers to a `Record`, or to a `Record` with a `Failure` that keeps the evidence.

Runs on the poll thread, so that batch N+1 is decoded while Postgres works on batch N. Pure, and
it never raises: whatever a producer sends, and whatever a model's own validators make of it, ends
as a message with an outcome.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import orjson

from processor import identity
from processor.records import Failure, Headers, Message, Record, last_header

if TYPE_CHECKING:
    from processor.config import MessageSettings
    from processor.dispatch import Routes

HASH_BYTES = 16

# A btree entry holds some 2700 bytes; an id near that is a mistake in the producer.
MAX_ID_CHARS = 512

# Integers that orjson would turn into floats without a word have at least 19 digits.
_MAYBE_HUGE = re.compile(rb"\d{19}")
_LONG_NUMBER = re.compile(rb"\d[\d.]{15}")
_MAX_EXPONENT = 400
_INTEGERS = range(-(2**63), 2**64)


class BadValue(ValueError):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = Failure(reason, detail)


_UNPARSED = object()


@dataclass(slots=True, eq=False)
class Incoming:
    """A record as the broker handed it over. The JSON inside is parsed at most once, and only if asked for."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers
    _document: Any = field(default=_UNPARSED)
    problem: BadValue | None = None
    defect: Failure | None = None  # something about it that could not even be read

    def header(self, name: str) -> bytes | None:
        return last_header(self.headers, name)

    def leave_unparsed(self) -> None:
        """Only what needs no document can name this record."""
        self._document = None

    def document(self) -> Any:
        """The value as JSON; None where it is absent or broken, and then `problem` says how."""
        if self._document is _UNPARSED:
            self._document = None
            if self.value is not None:
                try:
                    self._document = parse_json(self.value)
                except BadValue as problem:
                    self.problem = problem
        return self._document


def parse_json(value: bytes) -> Any:
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise BadValue("not_json", f"value is not JSON: {error}") from None
    if _MAYBE_HUGE.search(value):
        _refuse_huge_numbers(value)
    return document


def _refuse_huge_numbers(value: bytes) -> None:
    """Money must not become a float in silence: refuse what 64 bits cannot hold exactly."""

    def integer(digits: str) -> int:
        if len(digits) > 20 or int(digits) not in _INTEGERS:
            raise BadValue("number_out_of_range", f"value holds an integer beyond 64 bits: {digits[:40]}")
        return 0

    def decimal(digits: str) -> float:
        if not math.isfinite(float(digits)):
            raise BadValue("number_out_of_range", f"value holds a number beyond a double: {digits[:40]}")
        return 0.0

    try:
        json.loads(value, parse_int=integer, parse_float=decimal)
    except RecursionError:
        raise BadValue("not_json", "value is nested too deeply") from None


def may_lose_digits(value: bytes) -> bool:
    """Whether a number in there has more digits than a double holds: pydantic would read it through one."""
    return _LONG_NUMBER.search(value) is not None


def parse_exactly(value: bytes) -> Any:
    """JSON with every fraction as a Decimal: slower, and right to the last digit."""
    try:
        return json.loads(value, parse_float=_exact, parse_constant=_no_constant)
    except BadValue:
        raise
    except ValueError as error:
        raise BadValue("not_json", f"value is not JSON: {error}") from None
    except RecursionError:
        raise BadValue("not_json", "value is nested too deeply") from None


def _exact(digits: str) -> Decimal:
    """No exponent that would take minutes and gigabytes to write out as an integer."""
    exponent = digits.lower().partition("e")[2].lstrip("+-0")
    if len(exponent) > 3 or int(exponent or 0) > _MAX_EXPONENT:
        raise BadValue("number_out_of_range", f"value holds a number beyond a double: {digits[:40]}")
    return Decimal(digits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


class Decoder:
    def __init__(self, settings: MessageSettings, routes: Routes) -> None:
        self._types = identity.compile_chain(settings.type)
        self._ids = identity.compile_chain(settings.id)
        self._id_names = ", ".join(settings.id)
        self._scope = identity.scope(settings)
        self._max_bytes = settings.max_bytes
        self._routes = routes

    def decode(self, incoming: Incoming) -> Record:
        value = incoming.value
        size = len(value or b"") + len(incoming.key or b"")
        for name, text in incoming.headers:
            size += len(name) + len(text or b"")
        failure: Failure | None = None
        decoded: Any = None
        type_: str | None = None
        route = None
        if value is not None and len(value) > self._max_bytes:
            failure = Failure("oversized", f"value has {len(value)} bytes; message.max_bytes is {self._max_bytes}")
            incoming.leave_unparsed()
        type_ = _storable(identity.first(self._types, incoming, None))
        id_, id_failure = self._identify(incoming, type_)
        if failure is None:
            route = self._routes.find(type_)
            if route is None:
                failure = self._no_route(incoming, type_)
            else:
                try:
                    decoded = route.value(incoming)
                except BadValue as problem:
                    failure = problem.failure
                except Exception as error:  # from a validator of the handler's own model
                    failure = Failure("undecodable", f"validating the value failed: {type(error).__name__}: {error}")
        failure = failure or incoming.defect or id_failure
        message = Message(
            id_,
            type_,
            incoming.key,
            decoded,
            incoming.headers,
            incoming.topic,
            incoming.partition,
            incoming.offset,
            _timestamp(incoming.timestamp_ms),
        )
        payload_hash = None if value is None else hashlib.blake2b(value, digest_size=HASH_BYTES).digest()
        return Record(message, value, payload_hash, size, route, failure)

    def _identify(self, incoming: Incoming, type_: str | None) -> tuple[str, Failure | None]:
        """The id, or the coordinates and the reason why the message has none."""
        coordinates = f"{incoming.topic}:{incoming.partition}:{incoming.offset}"
        found = identity.first(self._ids, incoming, type_)
        if found is None:
            problem = incoming.problem
            detail = f"no message id: none of {self._id_names} yields one"
            return coordinates, Failure("missing_id", f"{detail} ({problem})" if problem else detail)
        scoped = self._scope(found, type_, incoming.timestamp_ms)
        if scoped is None:
            return coordinates, Failure("missing_id", "message.window_seconds is set, the record has no timestamp")
        if len(scoped) > MAX_ID_CHARS:
            return coordinates, Failure("bad_id", f"message id has {len(scoped)} characters, {MAX_ID_CHARS} at most")
        if "\0" in scoped:
            return coordinates, Failure("bad_id", "message id contains a NUL character")
        return scoped, None

    def _no_route(self, incoming: Incoming, type_: str | None) -> Failure:
        if type_ is not None:
            return Failure("unknown_type", f"no handler for type {type_!r}, and none for '*'")
        if incoming.problem is not None:
            return incoming.problem.failure
        return Failure("unknown_type", "the message names no type, and there is no handler for '*'")


def _timestamp(milliseconds: int | None) -> datetime | None:
    """Producers choose timestamps freely; one that no calendar holds is as good as none."""
    if milliseconds is None:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _storable(type_: str | None) -> str | None:
    """Postgres text cannot hold NUL; a type is a name, so cutting it short loses nothing real."""
    return None if type_ is None else type_.replace("\0", "\\0")[:MAX_ID_CHARS]
