"""Partitions that nobody reads, for tests of what is done with their records."""

from __future__ import annotations

from typing import Any, cast

from processor.kafka.assignment import Assignment
from processor.messages.message import Partition


def assignment(number: int = 0) -> Assignment:
    return Assignment(Partition("orders", number), cast("Any", None))
