"""JSON to the last digit: a number that would lose digits is refused, or read as Decimal."""

from __future__ import annotations

import json
import math
from decimal import Decimal
from typing import Any

import orjson

from processor.messages.failure import Failure

# Runs of digits are searched in a copy of the value with a 0 for every digit: several times as fast as a regular
# expression.
DIGITS = bytes(ord("0") if chr(byte).isdecimal() and byte < 128 else ord(" ") for byte in range(256))


DIGITS_AND_POINT = bytes(ord("0") if byte == ord(".") else DIGITS[byte] for byte in range(256))


# Integers that orjson would silently turn into floats have at least 19 digits.
MAYBE_HUGE = b"0" * 19


MAYBE_LONG = b"0" * 16


_MAX_EXPONENT = 400


_INTEGERS = range(-(2**63), 2**64)


class BadValue(ValueError):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.failure = Failure(reason, detail)


def parse_json(value: bytes) -> Any:
    try:
        document = orjson.loads(value)
    except orjson.JSONDecodeError as error:
        raise BadValue("not_json", f"value is not JSON: {error}") from None
    refuse_huge_numbers(value)
    return document


def refuse_huge_numbers(value: bytes) -> None:
    """Refuse integers that 64 bits cannot hold exactly: an amount of money must not silently become a float."""
    if MAYBE_HUGE not in value.translate(DIGITS):
        return

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
    """Return whether a number may have more digits than a double holds: pydantic would read it through a double."""
    return MAYBE_LONG in value.translate(DIGITS_AND_POINT)


def parse_exactly(value: bytes) -> Any:
    """Parse JSON with every fraction as a Decimal: slower, and exact to the last digit."""
    try:
        return json.loads(value, parse_float=_exact, parse_constant=_no_constant)
    except BadValue:
        raise
    except ValueError as error:
        raise BadValue("not_json", f"value is not JSON: {error}") from None
    except RecursionError:
        raise BadValue("not_json", "value is nested too deeply") from None


def _exact(digits: str) -> Decimal:
    """Refuse an exponent that would take minutes and gigabytes to write out as an integer."""
    exponent = digits.lower().partition("e")[2].lstrip("+-0")
    if len(exponent) > 3 or int(exponent or 0) > _MAX_EXPONENT:
        raise BadValue("number_out_of_range", f"value holds a number beyond a double: {digits[:40]}")
    return Decimal(digits)


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")
