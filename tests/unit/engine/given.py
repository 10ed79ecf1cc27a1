"""What tests of the engine begin with: settings, records and partitions, made of the real classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import SecretStr

from processor.engine.failing.budget import Budget
from processor.engine.partitions import OwnedPartition
from processor.handling.errors import HandlerError
from processor.kafka.assignment import Assignment
from processor.messages.batch import Batch
from processor.messages.failure import Failure
from processor.messages.message import Partition
from processor.messages.record import Reading, Record
from processor.settings.database import DatabaseSettings
from processor.settings.kafka import KafkaSettings
from processor.settings.schema import HandlerSettings, Settings
from tests.support.spans import span

# In place of a session, or of what needs one, where a test is of what needs none.
UNUSED: Any = None

FAILURE = Failure("rejected", "no such sku", exception="Reject")


def settings(**changes: Any) -> Settings:
    """Complete, for a broker that nobody listens for."""
    return Settings(
        **{
            "consumer": "c",
            "topics": ("orders",),
            "handlers": {"T": HandlerSettings(call="m:f")},
            "kafka": KafkaSettings(bootstrap_servers="127.0.0.1:1"),
            "database": DatabaseSettings(url=SecretStr("postgresql://x")),
            **changes,
        }
    )


def owned_partition(number: int = 0, topic: str = "orders", **failure: Any) -> OwnedPartition:
    budget = Budget(settings(failure=failure).failure)
    return OwnedPartition(Assignment(Partition(topic, number)), budget)


def current_reading(partition: OwnedPartition) -> Reading:
    reading = partition.assignment.reading
    assert reading is not None
    return reading


def records_of(reading: Reading, *offsets: int) -> list[Record]:
    return [record for offset in offsets for record in span(reading, offset, 1).rows()]


def batch_of(reading: Reading, count: int, first: int = 0) -> Batch:
    """In columns."""
    return Batch([span(reading, first, count)])


def offsets(records: Batch | Sequence[Record]) -> list[int]:
    rows = records.as_rows() if isinstance(records, Batch) else records
    return [record.message.offset for record in rows]


def in_handler(error: Exception, index: int | None = None) -> HandlerError:
    """As the run of handlers raises it."""
    raised = HandlerError(error, index)
    raised.__cause__ = error
    return raised


def caused_by(error: Exception, cause: Exception) -> Exception:
    """`raise error from cause`."""
    error.__cause__ = cause
    return error
