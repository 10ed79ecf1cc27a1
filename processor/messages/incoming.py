"""Records as the broker delivered them, one by one or as columns; their JSON is parsed at most once, on demand."""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count
from operator import add
from typing import Any, Protocol

import orjson

from processor.messages.failure import Failure
from processor.messages.formats.json import (
    DIGITS,
    DIGITS_AND_POINT,
    MAYBE_HUGE,
    MAYBE_LONG,
    BadValue,
    parse_json,
    refuse_huge_numbers,
)
from processor.messages.message import Headers, Partition
from processor.threads import MANY, breathe

TIMESTAMP_NOT_AVAILABLE = 0  # librdkafka's code for it

_NO_VALUE = 1  # differs from the checksum of an empty value: a delete marker is another message


class RawRecord(Protocol):
    """The part of confluent_kafka.Message that decoding needs."""

    def value(self) -> bytes | None: ...
    def key(self) -> bytes | None: ...
    def headers(self) -> Headers | None: ...
    def offset(self) -> int: ...
    def timestamp(self) -> tuple[int, int]: ...


_UNPARSED = object()


@dataclass(slots=True, eq=False)
class Incoming:
    """A record as the broker delivered it. Its JSON is parsed at most once, and only on demand."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers
    topic_id: str = ""
    _document: Any = field(default=_UNPARSED)
    problem: BadValue | None = None
    defect: Failure | None = None  # a part of it could not even be read

    def leave_unparsed(self) -> None:
        """Never parse the value: only strategies that need no document can name this record."""
        self._document = None

    def document(self) -> Any:
        """Return the value as JSON, or None if it is absent or broken; `problem` then says what is wrong with it."""
        if self._document is _UNPARSED:
            self._document = None
            if self.value is not None:
                try:
                    self._document = parse_json(self.value)
                except BadValue as problem:
                    self.problem = problem
        return self._document


class RawColumns:
    """Records of one partition as columns: work that all of them need is several times as fast this way."""

    def __init__(
        self, raws: Sequence[RawRecord], values: list[bytes], partition: Partition, topic_id: str = ""
    ) -> None:
        self.partition = partition
        self.topic_id = topic_id
        self.values = values
        self.keys = [raw.key() for raw in raws]
        self.headers: list[Headers] = [raw.headers() or () for raw in raws]
        self.offsets = [raw.offset() for raw in raws]
        self._timestamps = [raw.timestamp() for raw in raws]
        self._documents: list[Any] | None = None

    def only(self, where: Sequence[int]) -> RawColumns:
        """Return some of the records, with only those columns that a handler's value is read from."""
        some = RawColumns((), [self.values[index] for index in where], self.partition, self.topic_id)
        if self._documents is not None:
            some._documents = [self._documents[index] for index in where]
        return some

    def documents(self) -> list[Any] | None:
        """Return the values as JSON, or None if one of them cannot be parsed exactly."""
        if self._documents is None:
            try:
                self._documents = list(map(orjson.loads, self.values))
                self.breathe()
                for index in self._with_run_of(DIGITS, MAYBE_HUGE):  # the digits may also be in a text, such as an id
                    refuse_huge_numbers(self.values[index])
            except (orjson.JSONDecodeError, BadValue):
                self._documents = None
        return self._documents

    def breathe(self) -> None:
        """Let other threads run between two steps that take long for many records."""
        if len(self.values) >= MANY:
            breathe()

    def timestamps(self) -> list[int | None]:
        """Return the timestamps in milliseconds, None for records without one."""
        kinds, times = zip(*self._timestamps, strict=True)
        if TIMESTAMP_NOT_AVAILABLE in kinds:
            return [None if kind == TIMESTAMP_NOT_AVAILABLE else time for kind, time in self._timestamps]
        return list(times)

    def checksums(self) -> list[int]:
        """Return `checksum_of` of each value."""
        return array("i", array("I", map(zlib.crc32, self.values)).tobytes()).tolist()

    def sizes(self) -> Iterable[int]:
        """Return `size_of` of each record."""
        if any(self.headers) or None in self.keys:
            return map(size_of, self.keys, self.values, self.headers)
        return map(add, map(len, self.values), map(len, self.keys))  # type: ignore[arg-type]

    def may_lose_digits(self) -> bool:
        return next(self._with_run_of(DIGITS_AND_POINT, MAYBE_LONG), None) is not None

    def _with_run_of(self, table: bytes, run: bytes) -> Iterator[int]:
        """Yield the indexes of values that hold such a run. Most hold none, so all are searched as one text."""
        together = b" ".join(self.values).translate(table)
        at = together.find(run)
        if at < 0:
            return
        ends = list(map(add, accumulate(map(len, self.values)), count(1)))
        while at >= 0:
            index = bisect_right(ends, at)
            yield index
            at = together.find(run, ends[index])


def size_of(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    size = (0 if value is None else len(value)) + (0 if key is None else len(key))
    for name, text in headers:
        size += len(name) + len(text or b"")
    return size


def checksum_of(value: bytes | None) -> int:
    """Return a checksum that fits Postgres' integer. It tells a repetition from another message of the same id.

    It is no protection against forgery.
    """
    if value is None:
        return _NO_VALUE
    checksum = zlib.crc32(value)
    return checksum if checksum < 2**31 else checksum - 2**32
