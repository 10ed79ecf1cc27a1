"""Bytes and headers to records; one that cannot be decoded has a `Failure` that keeps the evidence.

Runs on the poll thread, so that batch N+1 is decoded while Postgres works on batch N. Pure, and
it never raises: whatever a producer sends, and whatever a model's own validators make of it, ends
as a message with an outcome.
"""

from __future__ import annotations

import zlib
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, count
from operator import add, itemgetter
from typing import TYPE_CHECKING, Any, Protocol, cast

import orjson

from processor.errors import text_of
from processor.messages import identity
from processor.messages.batch import ColumnSpan, Records, RowSpan, Span
from processor.messages.formats.json import (
    _DIGITS,
    _DIGITS_AND_POINT,
    _MAYBE_HUGE,
    _MAYBE_LONG,
    BadValue,
    _refuse_huge_numbers,
    parse_json,
)
from processor.messages.message import Headers, Message, Partition, place
from processor.messages.record import Failure, Record
from processor.service.interpreter import MANY, breathe

if TYPE_CHECKING:
    from processor.handling.registry import Route, Routes
    from processor.kafka.assignment import Assignment
    from processor.settings.schema import Settings

# A btree entry holds some 2700 bytes; an id near that is a mistake in the producer.
MAX_ID_CHARS = 512

# The inbox adds to an id that is not one row's alone where the message came from: room for the longest topic, and more.
MAX_STORED_ID_CHARS = 2 * MAX_ID_CHARS

# Names the message that an operator sends once more: the consumer that is to have it, a colon, its id in the inbox.
REDRIVE = "processor-redrive"

# So many records are decoded together where one among more is unusual.
PIECES = (100, 20)
TIMESTAMP_NOT_AVAILABLE = 0  # as librdkafka says it

_NO_VALUE = 1  # a delete marker is not the same as an empty value


class RawRecord(Protocol):
    """What is needed of confluent_kafka.Message."""

    def value(self) -> bytes | None: ...
    def key(self) -> bytes | None: ...
    def headers(self) -> Headers | None: ...
    def offset(self) -> int: ...
    def timestamp(self) -> tuple[int, int]: ...


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
    topic_id: str = ""
    _document: Any = field(default=_UNPARSED)
    problem: BadValue | None = None
    defect: Failure | None = None  # something about it that could not even be read

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


class RawColumns:
    """Records of one partition, column by column: what all of them need is done several times as fast this way."""

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
        """Some of the records, with what a handler's value is read from."""
        some = RawColumns((), [self.values[index] for index in where], self.partition, self.topic_id)
        if self._documents is not None:
            some._documents = [self._documents[index] for index in where]
        return some

    def documents(self) -> list[Any] | None:
        """The values as JSON; None if there is a problem with one of them."""
        if self._documents is None:
            try:
                self._documents = list(map(orjson.loads, self.values))
                self.breathe()
                for index in self._with_run_of(_DIGITS, _MAYBE_HUGE):  # in an id perhaps, which is text
                    _refuse_huge_numbers(self.values[index])
            except (orjson.JSONDecodeError, BadValue):
                self._documents = None
        return self._documents

    def breathe(self) -> None:
        """Between two things that take a moment for many records."""
        if len(self.values) >= MANY:
            breathe()

    def timestamps(self) -> list[int | None]:
        """In milliseconds, where there is one."""
        kinds, times = zip(*self._timestamps, strict=True)
        if TIMESTAMP_NOT_AVAILABLE in kinds:
            return [None if kind == TIMESTAMP_NOT_AVAILABLE else time for kind, time in self._timestamps]
        return list(times)

    def checksums(self) -> list[int]:
        """What `_checksum` gives for each."""
        return array("i", array("I", map(zlib.crc32, self.values)).tobytes()).tolist()

    def sizes(self) -> Iterable[int]:
        """What `_size` gives for each."""
        if any(self.headers) or None in self.keys:
            return map(_size, self.keys, self.values, self.headers)
        return map(add, map(len, self.values), map(len, self.keys))  # type: ignore[arg-type]

    def may_lose_digits(self) -> bool:
        return next(self._with_run_of(_DIGITS_AND_POINT, _MAYBE_LONG), None) is not None

    def _with_run_of(self, table: bytes, run: bytes) -> Iterator[int]:
        """Which values have such a run in them; most have none, and are looked at all together."""
        together = b" ".join(self.values).translate(table)
        at = together.find(run)
        if at < 0:
            return
        ends = list(map(add, accumulate(map(len, self.values)), count(1)))
        while at >= 0:
            index = bisect_right(ends, at)
            yield index
            at = together.find(run, ends[index])


class Decoder:
    def __init__(self, settings: Settings, routes: Routes) -> None:
        message = settings.message
        self._type = identity.compile_chain(message.type)
        self._id = identity.compile_chain(message.id)
        self._redrive_id = identity.compile_chain([f"header:{REDRIVE}"])
        self._id_names = ", ".join(message.id)
        self._consumer = settings.consumer
        self._scope = identity.scope(message)
        self._key = identity.inbox_key(settings.consumer)
        self._keys = identity.inbox_keys(settings.consumer)
        self._max_bytes = message.max_bytes
        self._routes = routes

    def decode_all(self, raws: Sequence[RawRecord], assignment: Assignment) -> Records:
        """What `decode` gives for each; by the column where nothing is unusual about any of them."""
        return Records(self._decode(raws, assignment) if raws else [])

    def _decode(self, raws: Sequence[RawRecord], assignment: Assignment) -> list[Span]:
        """Together, or else in smaller and smaller pieces, or else one by one."""
        together = self._decode_usual(raws, assignment)
        if together is not None:
            return [together]
        size = next((size for size in PIECES if size < len(raws)), None)
        if size is None:
            alone = [self.decode(_incoming(raw, assignment), assignment) for raw in raws]
            return [RowSpan(assignment, alone)]
        pieces = [raws[first : first + size] for first in range(0, len(raws), size)]
        return [span for piece in pieces for span in self._decode(piece, assignment)]

    def _decode_usual(self, raws: Sequence[RawRecord], assignment: Assignment) -> Span | None:
        """None if a record among them is unusual: no value, too large, not decodable, no id, no handler, redriven."""
        values = [raw.value() for raw in raws]
        if None in values or max(map(len, values)) > self._max_bytes:  # type: ignore[arg-type]
            return None
        try:
            columns = RawColumns(raws, cast("list[bytes]", values), assignment.partition, assignment.topic_id)
        except Exception:  # a header's name that is not UTF-8
            return None
        if REDRIVE in map(_name, chain.from_iterable(columns.headers)):
            return None
        types = self._type.column(columns)
        ids = self._id.column(columns)
        if types is None or ids is None or not all(ids):
            return None
        names = set(types)
        timestamps = columns.timestamps()
        if self._scope is not None:
            ids = list(map(self._scope, ids, types, timestamps))  # type: ignore[arg-type]
            if not all(ids):
                return None
        for texts in (ids, [name for name in names if name]):
            if texts and (max(map(len, texts)) > MAX_ID_CHARS or "\0" in "".join(texts)):  # type: ignore[arg-type]
                return None
        decoded = self._values(columns, types, names)
        if decoded is None:
            return None
        routes, documents = decoded
        columns.breathe()
        inbox_keys = self._keys(cast("list[str]", ids))
        columns.breathe()
        usual = ColumnSpan(
            assignment,
            routes[0],
            cast("list[str]", ids),
            [type_ or None for type_ in types] if "" in names else list(types),
            columns.keys,
            list(documents),
            columns.headers,
            columns.offsets,
            timestamps,
            inbox_keys,
            columns.values,
            columns.checksums(),
            list(columns.sizes()),
        )
        if len(routes) == 1:
            return usual
        records = usual.records()
        for record, route in zip(records, routes, strict=True):
            record.route, record.in_inbox = route, route.inbox
        return RowSpan(assignment, records)

    def _values(
        self, columns: RawColumns, types: Sequence[str | None], names: set[str | None]
    ) -> tuple[list[Route], Sequence[Any]] | None:
        """The route of all of them, or one for each, and the values as handlers want them.

        None if one has no handler or a bad value.
        """
        found = {name: self._routes.find(name) for name in names}
        if None in found.values():
            return None
        routes = cast("list[Route]", list(set(found.values())))
        if len(routes) == 1:
            values = routes[0].values(columns)
            return None if values is None else (routes, values)
        routes = cast("list[Route]", [found[type_] for type_ in types])
        mixed: list[Any] = [None] * len(routes)
        for route in dict.fromkeys(routes):
            where = [index for index, one in enumerate(routes) if one is route]
            values = route.values(columns.only(where))
            if values is None:
                return None
            for index, value in zip(where, values, strict=True):
                mixed[index] = value
        return routes, mixed

    def decode(self, incoming: Incoming, assignment: Assignment) -> Record:
        value, key = incoming.value, incoming.key
        failure: Failure | None = None
        decoded: Any = None
        route: Route | None = None
        if value is not None and len(value) > self._max_bytes:
            failure = Failure("oversized", f"value has {len(value)} bytes; message.max_bytes is {self._max_bytes}")
            incoming.leave_unparsed()
        type_ = self._type.one(incoming, None) or None
        if type_ is not None and ("\0" in type_ or len(type_) > MAX_ID_CHARS):
            # Postgres text cannot hold NUL; a type is a name, so cutting it short loses nothing real.
            type_ = type_.replace("\0", "\\0")[:MAX_ID_CHARS]
        redriven = REDRIVE in map(_name, incoming.headers)
        id_, id_failure = self._redriven(incoming) if redriven else self._identified(incoming, type_)
        foreign = redriven and id_failure is None and not id_
        if foreign:
            id_, failure = _place(incoming), None
        elif failure is None:
            route = self._routes.find(type_)
            if route is None:
                failure = self._no_route(incoming, type_)
            else:
                try:
                    decoded = route.value(incoming)
                except BadValue as problem:
                    failure = problem.failure
                except Exception as error:  # from a validator of the handler's own model
                    failure = Failure(
                        "undecodable", f"validating the value failed: {type(error).__name__}: {text_of(error)}"
                    )
        return Record(
            Message(
                id_,
                type_,
                key,
                decoded,
                incoming.headers,
                incoming.topic,
                incoming.partition,
                incoming.offset,
                incoming.timestamp_ms,
            ),
            self._key(id_),
            value,
            _checksum(value),
            _size(key, value, incoming.headers),
            route,
            not foreign and (route is None or route.inbox or redriven),  # what is redriven has a row
            None if foreign else failure or incoming.defect or id_failure,
            assignment,
            redriven=redriven,
            foreign=foreign,
        )

    def _identified(self, incoming: Incoming, type_: str | None) -> tuple[str, Failure | None]:
        """The id, or the place in Kafka and the reason why the message has none."""
        found = self._id.one(incoming, type_)
        if not found:
            problem = incoming.problem
            detail = f"no message id: none of {self._id_names} yields one"
            return _place(incoming), Failure("missing_id", f"{detail} ({problem})" if problem else detail)
        scoped = self._scope(found, type_, incoming.timestamp_ms) if self._scope else found
        if scoped is None:
            detail = "message.window_seconds is set, the record has no timestamp"
            return _place(incoming), Failure("missing_id", detail)
        return _storable(scoped, incoming)

    def _redriven(self, incoming: Incoming) -> tuple[str, Failure | None]:
        """As `_identified`, by the header alone: it holds what scope and window made of the id the first time.

        Takes the header away: the message is the one it was before. An empty id if it is for another consumer.
        """
        found = self._redrive_id.one(incoming, None) or ""
        incoming.headers = [header for header in incoming.headers if header[0] != REDRIVE]
        consumer, colon, id_ = found.partition(":")
        if consumer != self._consumer and colon:
            return "", None
        if not id_:
            return _place(incoming), Failure("missing_id", f"header {REDRIVE} holds no message id")
        return _storable(id_, incoming, MAX_STORED_ID_CHARS)

    def _no_route(self, incoming: Incoming, type_: str | None) -> Failure:
        if type_ is not None:
            return Failure("unknown_type", f"no handler for type {type_!r}, and none for '*'")
        if incoming.problem is not None:
            return incoming.problem.failure
        return Failure("unknown_type", "the message names no type, and there is no handler for '*'")


_name: Callable[[tuple[str, bytes | None]], str] = itemgetter(0)  # of a header


def _place(incoming: Incoming) -> str:
    return place(incoming.topic, incoming.topic_id, incoming.partition, incoming.offset)


def _storable(id_: str, incoming: Incoming, most: int = MAX_ID_CHARS) -> tuple[str, Failure | None]:
    if len(id_) > most:
        detail = f"message id has {len(id_)} characters, {most} at most"
        return _place(incoming), Failure("bad_id", detail)
    if "\0" in id_:
        return _place(incoming), Failure("bad_id", "message id contains a NUL character")
    return id_, None


def _incoming(raw: RawRecord, assignment: Assignment) -> Incoming:
    partition = assignment.partition
    kind, timestamp = raw.timestamp()
    defect = None
    try:
        headers = raw.headers() or ()
    except Exception as error:  # a header's name that is not UTF-8
        headers = ()
        defect = Failure("bad_headers", f"the headers cannot be read: {type(error).__name__}: {error}")
    return Incoming(
        partition.topic,
        partition.number,
        raw.offset(),
        None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp,
        raw.key(),
        raw.value(),
        headers,
        assignment.topic_id,
        defect=defect,
    )


def _size(key: bytes | None, value: bytes | None, headers: Headers) -> int:
    size = (0 if value is None else len(value)) + (0 if key is None else len(key))
    for name, text in headers:
        size += len(name) + len(text or b"")
    return size


def _checksum(value: bytes | None) -> int:
    """As Postgres' integer holds it. Tells repetitions from other messages under the same id, and guards nothing."""
    if value is None:
        return _NO_VALUE
    checksum = zlib.crc32(value)
    return checksum if checksum < 2**31 else checksum - 2**32
