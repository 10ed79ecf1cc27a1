"""Readings of partitions that nobody reads, for tests of what is done with their records."""

from __future__ import annotations

from processor.messages.message import Partition
from processor.messages.record import Reading


def reading(number: int = 0, topic: str = "orders") -> Reading:
    return Reading(Partition(topic, number), partition_id=number, topic_id="", epoch=1, ledger_id=number)
