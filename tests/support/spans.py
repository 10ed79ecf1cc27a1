"""Spans of plain records, in columns and in rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from processor import Database, Message
from processor.handling.registry import _signature, _value_readers
from processor.messages import identity
from processor.messages.batch import ColumnSpan, RowSpan
from processor.messages.record import Reading
from processor.messages.types import MessageType

KEY = identity.inbox_key("c")


async def one(message: Message[Any], db: Database) -> None: ...
async def other(message: Message[Any], db: Database) -> None: ...


def message_type(handler: Any) -> MessageType:
    _, _, annotation = _signature(handler)
    return MessageType("T", handler.__name__, *_value_readers(annotation))


ONE, OTHER = message_type(one), message_type(other)


def span(
    reading: Reading, first: int, count: int, of: MessageType = ONE, sizes: Sequence[int] | None = None
) -> ColumnSpan:
    offsets = list(range(first, first + count))
    ids = [f"m{reading.partition.number}.{offset}" for offset in offsets]
    return ColumnSpan(
        reading,
        of,
        ids,
        ["T"] * count,
        [f"k{offset}".encode() for offset in offsets],
        [{"n": offset} for offset in offsets],
        [(("h", str(offset).encode()),) for offset in offsets],
        offsets,
        [None if offset % 2 else 1_700_000_000_000 + offset for offset in offsets],
        list(map(KEY, ids)),
        [b'{"n":%d}' % offset for offset in offsets],
        [offset * 7 for offset in offsets],
        list(sizes) if sizes is not None else [10 + offset for offset in offsets],
    )


def row_span(reading: Reading, first: int, count: int, sizes: Sequence[int] | None = None) -> RowSpan:
    return RowSpan(reading, span(reading, first, count, sizes=sizes).rows())
