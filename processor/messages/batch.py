"""Records in bulk: columns as long as nothing is special about any of them, an object for each where it matters.

Nearly all records are usual ones: decoded, with a handler and an id, never seen before. What is done with those is
done by the column, and no object is made for any of them. Whoever has something to say about a single record (it
failed, it has to wait, it was tried before) asks for it as a `Record`; from then on the records tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, overload

from processor.messages.message import Headers, Message
from processor.messages.record import Record

if TYPE_CHECKING:
    from processor.handling.registry import Route
    from processor.kafka.assignment import Assignment


@dataclass(slots=True, eq=False)
class ColumnSpan:
    """Usual records of one partition in a row, all for one handler."""

    assignment: Assignment
    route: Route
    ids: list[str]
    types: list[str | None]
    keys: list[bytes | None]
    values: list[Any]
    headers: list[Headers]
    offsets: list[int]
    timestamps: list[int | None]
    inbox_keys: list[bytes]
    payloads: list[bytes]
    checksums: list[int]
    sizes: list[int]
    size: int = field(init=False)  # of all
    _messages: list[Message[Any]] | None = None
    _records: list[Record] | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self.offsets[-1] + 1

    @property
    def told(self) -> bool:
        """Whether there are records by now, which may tell something else."""
        return self._records is not None

    def __post_init__(self) -> None:
        self.size = sum(self.sizes)

    def part(self, start: int, end: int) -> ColumnSpan:
        """Some of them; nothing has been made of any yet."""
        if end - start == len(self):
            return self
        return ColumnSpan(self.assignment, self.route, *(column[start:end] for column in _columns(self)))

    def messages(self) -> list[Message[Any]]:
        if self._messages is None:
            topic, partition = self.assignment.partition
            self._messages = list(
                map(
                    Message,
                    self.ids,
                    self.types,
                    self.keys,
                    self.values,
                    self.headers,
                    repeat(topic),
                    repeat(partition),
                    self.offsets,
                    self.timestamps,
                )
            )
        return self._messages

    def records(self) -> list[Record]:
        if self._records is None:
            self._records = list(
                map(
                    Record,
                    self.messages(),
                    self.inbox_keys,
                    self.payloads,
                    self.checksums,
                    self.sizes,
                    repeat(self.route),
                    repeat(self.route.inbox),
                    repeat(None),
                    repeat(self.assignment),
                )
            )
        return self._records


_columns = attrgetter(
    "ids",
    "types",
    "keys",
    "values",
    "headers",
    "offsets",
    "timestamps",
    "inbox_keys",
    "payloads",
    "checksums",
    "sizes",
)


class RowSpan:
    """Records of one partition in a row, some of them unusual."""

    def __init__(self, assignment: Assignment, records: list[Record]) -> None:
        self.assignment = assignment
        self.sizes = [record.size for record in records]
        self.size = sum(self.sizes)
        self._records = records

    def __len__(self) -> int:
        return len(self._records)

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self._records[-1].next_offset

    def part(self, start: int, end: int) -> RowSpan:
        return RowSpan(self.assignment, self._records[start:end])

    def messages(self) -> list[Message[Any]]:
        return [record.message for record in self._records]

    def records(self) -> list[Record]:
        return self._records


Span: TypeAlias = ColumnSpan | RowSpan


class Records(Sequence[Record]):
    """What was decoded, or what is to be processed together: partition by partition, and in order within each."""

    def __init__(self, spans: list[Span], readings: dict[Assignment, int] | None = None) -> None:
        self.spans = spans
        self.readings = readings or {}  # which reading of each partition they are of
        self._length = sum(map(len, spans))
        self._records: list[Record] | None = None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return self._all()[index]

    def __iter__(self) -> Iterator[Record]:
        return iter(self._all())

    def _all(self) -> list[Record]:
        if self._records is None:
            self._records = [record for span in self.spans for record in span.records()]
        return self._records


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Usual records for one handler, by the column."""

    spans: list[ColumnSpan]

    @property
    def route(self) -> Route:
        return self.spans[0].route

    def __len__(self) -> int:
        return sum(map(len, self.spans))

    def column(self, name: str) -> list[Any]:
        """To be looked at: it may be a span's own."""
        if len(self.spans) == 1:
            column: list[Any] = getattr(self.spans[0], name)
            return column
        return list(chain.from_iterable(map(attrgetter(name), self.spans)))

    def messages(self) -> list[Message[Any]]:
        return [message for span in self.spans for message in span.messages()]


def usual(records: Sequence[Record]) -> Columns | None:
    """These by the column, if that tells all there is to know about them."""
    if not isinstance(records, Records) or not records.spans:
        return None
    spans = [span for span in records.spans if isinstance(span, ColumnSpan) and not span.told]
    if len(spans) < len(records.spans) or any(span.route is not spans[0].route for span in spans):
        return None
    return Columns(spans)


def told(records: Sequence[Record]) -> Sequence[Record]:
    """Those about which there may be something to tell: none of usual ones."""
    return () if usual(records) is not None else records


def messages_of(records: Sequence[Record]) -> list[Message[Any]]:
    bulk = usual(records)
    return bulk.messages() if bulk is not None else [record.message for record in records]


def assignments_of(records: Sequence[Record]) -> list[Assignment]:
    """In their order."""
    return list(ends_of(records))


def ends_of(records: Sequence[Record]) -> dict[Assignment, int]:
    """The offset after the last record of each partition."""
    if (bulk := usual(records)) is not None:
        return {span.assignment: span.end for span in bulk.spans}
    return {record.assignment: record.next_offset for record in records}


def sizes_of(records: Sequence[Record]) -> dict[Assignment, int]:
    """How many there are of each partition."""
    sizes: dict[Assignment, int] = {}
    for assignment, start, end in stretches_of(records):
        sizes[assignment] = sizes.get(assignment, 0) + end - start
    return sizes


def stretches_of(records: Sequence[Record]) -> list[tuple[Assignment, int, int]]:
    """Whose records are from where to where."""
    if isinstance(records, Records):
        lengths = [(span.assignment, len(span)) for span in records.spans]
    else:
        lengths = [(assignment, len(list(run))) for assignment, run in groupby(map(_assignment, records))]
    ends = accumulate(length for _, length in lengths)
    return [(assignment, end - length, end) for (assignment, length), end in zip(lengths, ends, strict=True)]


_assignment = attrgetter("assignment")
