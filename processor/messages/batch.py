"""Records that are processed together: in columns while nothing is special about any of them, else in rows.

Nearly all records are usual: decoded, with a handler and an id, never seen before. They are handled as columns, without
an object for each. Where something is decided about a single record (it failed, it has to wait, it was tried before),
`as_rows` makes a `Record` of each, once and for good: decisions are kept in the records, and columns would not show
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, groupby, repeat
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias

from processor.messages.message import Headers, Message, Partition
from processor.messages.record import Reading, Record

if TYPE_CHECKING:
    from processor.messages.types import MessageType


@dataclass(slots=True, eq=False)
class ColumnSpan:
    """Consecutive usual records of one partition, all for one handler."""

    reading: Reading
    message_type: MessageType
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
    size: int = field(init=False)  # of all records, in bytes
    _messages: list[Message[Any]] | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self.offsets[-1] + 1

    def __post_init__(self) -> None:
        self.size = sum(self.sizes)

    def part(self, start: int, end: int) -> ColumnSpan:
        if end - start == len(self):
            return self
        return ColumnSpan(self.reading, self.message_type, *(column[start:end] for column in _columns(self)))

    def messages(self) -> list[Message[Any]]:
        """Return the messages, made once: handlers name them as causes, by identity."""
        if self._messages is None:
            topic, partition = self.reading.partition
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

    def rows(self) -> list[Record]:
        return list(
            map(
                Record,
                self.messages(),
                self.inbox_keys,
                self.payloads,
                self.checksums,
                self.sizes,
                repeat(self.message_type),
                repeat(self.message_type.in_inbox),
                repeat(None),
                repeat(self.reading),
            )
        )


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
    """Consecutive records of one partition, some of them unusual."""

    def __init__(self, reading: Reading, rows: list[Record]) -> None:
        self.reading = reading
        self.sizes = [record.size for record in rows]
        self.size = sum(self.sizes)
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def end(self) -> int:
        """The offset after the last one."""
        return self._rows[-1].next_offset

    def part(self, start: int, end: int) -> RowSpan:
        return RowSpan(self.reading, self._rows[start:end])

    def rows(self) -> list[Record]:
        return self._rows


Span: TypeAlias = ColumnSpan | RowSpan


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """A batch as columns: usual records for one handler."""

    spans: list[ColumnSpan]

    @property
    def message_type(self) -> MessageType:
        return self.spans[0].message_type

    def __len__(self) -> int:
        return sum(map(len, self.spans))

    def column(self, name: str) -> list[Any]:
        """Return one column of all records. Do not change the list: it may be the span's own."""
        if len(self.spans) == 1:
            column: list[Any] = getattr(self.spans[0], name)
            return column
        return list(chain.from_iterable(map(attrgetter(name), self.spans)))

    def messages(self) -> list[Message[Any]]:
        return [message for span in self.spans for message in span.messages()]


class Batch:
    """Records partition by partition, in offset order within each; either `columns` or `rows` is authoritative."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.columns = _as_columns(spans)
        self._rows: list[Record] | None = None
        self._length = sum(map(len, spans))

    @classmethod
    def of_rows(cls, rows: Iterable[Record]) -> Batch:
        return cls([RowSpan(reading, list(run)) for reading, run in groupby(rows, key=_reading)])

    def __len__(self) -> int:
        return self._length

    @property
    def rows(self) -> Sequence[Record]:
        """One record for each message; empty while the batch is in columns."""
        return () if self.columns is not None else self.as_rows()

    def as_rows(self) -> list[Record]:
        """Turn the batch into rows, for good."""
        if self._rows is None:
            self._rows = [record for span in self.spans for record in span.rows()]
            self.columns = None
        return self._rows

    def part(self, start: int, end: int) -> Batch:
        """Return some of the records, as rows unless it is all of them."""
        return self if end - start == len(self) else Batch.of_rows(self.as_rows()[start:end])

    def messages(self) -> list[Message[Any]]:
        return self.columns.messages() if self.columns is not None else [record.message for record in self.rows]

    def readings(self) -> dict[Partition, Reading]:
        """The readings by partition, in the order of the records."""
        return {span.reading.partition: span.reading for span in self.spans}

    def ends(self) -> dict[Partition, int]:
        """The offset after the last record of each partition."""
        return {span.reading.partition: span.end for span in self.spans}

    def sizes(self) -> dict[Partition, int]:
        """The number of records of each partition."""
        sizes: dict[Partition, int] = {}
        for span in self.spans:
            sizes[span.reading.partition] = sizes.get(span.reading.partition, 0) + len(span)
        return sizes

    def stretches(self) -> list[tuple[Partition, int, int]]:
        """Consecutive records of one partition, as (partition, first index, index after the last)."""
        ends = accumulate(map(len, self.spans))
        return [(span.reading.partition, end - len(span), end) for span, end in zip(self.spans, ends, strict=True)]


def _as_columns(spans: Sequence[Span]) -> Columns | None:
    columns = [span for span in spans if isinstance(span, ColumnSpan)]
    if not columns or len(columns) < len(spans):
        return None
    if any(span.message_type is not columns[0].message_type for span in columns):
        return None
    return Columns(columns)


_reading = attrgetter("reading")
