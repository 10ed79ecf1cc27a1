"""Ranges of several topics, read once from beginning to end: each committed record as it came."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from processor.kafka.scan import Scan

if TYPE_CHECKING:
    from processor.messages.message import Headers, Partition
    from processor.settings.kafka import KafkaSettings


class Scanned(NamedTuple):
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


def scan(
    settings: KafkaSettings, name: str, ranges: Mapping[Partition, range], each: Callable[[Scanned], None]
) -> None:
    """Call `each` with every committed record of these offsets. It blocks."""
    reader = Scan(settings, name)
    try:
        for partition, wanted in ranges.items():
            reader.begin(partition, wanted.start, wanted.stop)
            message: Any  # its headers are declared as something that they never are
            while (messages := reader.more()) is not None:
                for message in messages:
                    headers = tuple(message.headers() or ())
                    each(Scanned(partition.topic, message.key(), message.value(), headers))
    finally:
        reader.close()
