"""Records as the arguments of statements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processor.messages.record import Record


def uuids(keys: Iterable[bytes]) -> list[str]:
    """Return inbox keys as Postgres' uuid reads them."""
    return [key.hex() for key in keys]


def columns_of(records: Sequence[Record]) -> tuple[list[int], list[int], list[int]]:
    """Return partition ids, offsets and payload hashes."""
    return (
        [record.reading.partition_id for record in records],
        [record.message.offset for record in records],
        [record.payload_hash for record in records],
    )
