"""Partitions that are given rather than assigned by a group, each up to an end: those of a replay.

Stands where a membership does (membership.py). No group is joined, so no generation proves to the broker that offsets
are committed by their owner. What shuts out a predecessor is the transactional id: there is only one for the job, and
initialising a producer of that name ends all that an earlier one could still do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from processor.kafka.outsider import outsider

if TYPE_CHECKING:
    from processor.kafka.reader import PartitionReader
    from processor.messages.message import Partition
    from processor.settings.kafka import KafkaSettings


class FixedAssignment:
    def __init__(
        self, settings: KafkaSettings, group: str, reader: PartitionReader, ends: Mapping[Partition, int]
    ) -> None:
        self._reader = reader
        self._ends = ends
        self._consumer = outsider(settings, group)
        self._metadata = self._consumer.consumer_group_metadata()

    def start(self, _instance: str | None = None) -> None:
        self._reader.assign(self._ends, self._ends)

    def close(self) -> None:
        self._consumer.close()

    def metadata(self, _refused: Any = None) -> Any:
        """Return what the broker is to store the offsets under; it is always the same."""
        return self._metadata
