"""Events are an interface: operators search the logs for their names, and alert on their levels and fields."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import pytest
from structlog.testing import capture_logs

from processor.observe import events, logs
from processor.observe.events import ORDINARY_FINDINGS, Event, Events, PartitionReady, StoredOutputsSent

COUNTS = ["records", "completed", "duplicates", "failed", "parked", "collisions", "outputs"]

# Deployments search for these names and alert on these levels and fields: a change here breaks theirs.
LINES: dict[str, tuple[str, list[str]]] = {
    "attempts_not_abandoned": ("debug", ["reason"]),
    "attempts_not_ended": ("debug", ["reason"]),
    "batch_committed": ("debug", [*COUNTS, "round_trips"]),
    "batch_retried": ("info", ["reason", "times", "records"]),
    "frozen_session_ended": ("warning", ["backend"]),
    "lease_expired": ("warning", ["message_id"]),
    "lease_not_renewed": ("warning", ["message_id", "reason"]),
    "left_to_recovery": ("warning", ["reason"]),
    "message_collided": ("warning", ["message_id", "at"]),
    "message_failed": ("warning", ["message_id", "at", "reason", "detail"]),
    "message_parked": ("info", ["message_id", "at"]),
    "message_retried": ("info", ["message_id", "at", "attempt", "seconds", "reason"]),
    "nothing_reaped": ("warning", ["reason"]),
    "orphans_not_seen": ("debug", ["reason"]),
    "partition_halted": ("error", ["partition", "reason"]),
    "partition_held": ("info", ["partition", "seconds", "reason"]),
    "partition_ready": ("warning", ["partition", "found", "start"]),  # of what is not ordinary
    "producer_not_ready": ("warning", ["reason"]),
    "progress": (
        "info",
        [*COUNTS[:5], "retried", *COUNTS[5:], "batches", "round_trips"],
    ),
    "publication_failed": ("error", ["exc_info"]),
    "recovery_retried": ("warning", ["reason", "tries", "partitions"]),
    "retention_failed": ("warning", ["reason"]),
    "retention_held": ("info", ["reason"]),
    "retention_pruned": ("info", ["deleted", "before", "pages", "seconds", "archive"]),
    "retention_slow": ("warning", ["seconds", "period"]),
    "rollback_failed": ("debug", ["error"]),
    "started": ("info", ["consumer", "topics", "pid"]),
    "starting_over": ("warning", ["reason", "kind", "partitions"]),
    "stored_outputs_sent": ("info", ["outputs"]),
    "troubles_not_written": ("debug", ["reason"]),
}
# What a line has besides.
TAKEN = {"timestamp", "level", "event", "logger"}


def kinds(of: type[Event] = Event) -> Iterator[type[Event]]:
    for kind in of.__subclasses__():
        if kind.__module__ == events.__name__:
            yield kind
        yield from kinds(kind)


KINDS = sorted(kinds(), key=lambda kind: kind.name)


def sample(kind: type[Event]) -> Event:
    """Every field has a value of its own."""
    return kind(**{field.name: f"its {field.name}" for field in fields(kind)})


def written(event: Event) -> list[dict[str, Any]]:
    with capture_logs() as lines:
        logs.write(event)
    return [dict(line) for line in lines]


def test_every_kind_of_event_is_in_the_table_under_a_name_of_its_own() -> None:
    assert [kind.name for kind in KINDS] == sorted(LINES)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))
def test_event_is_one_line_with_its_name_its_level_and_all_of_its_fields(kind: type[Event]) -> None:
    level, names = LINES[kind.name]
    assert [field.name for field in fields(kind)] == names
    line = {"event": kind.name, "log_level": level, **{name: f"its {name}" for name in names}}
    assert written(sample(kind)) == [line]
    assert not TAKEN & set(names)


@pytest.mark.parametrize(
    ("found", "level"),
    [
        ("first_start", "info"),
        ("partition_added", "info"),
        ("in_step", "info"),
        ("died_between_commits", "info"),
        ("offsets_adopted", "warning"),
        ("offsets_forgotten", "warning"),
        ("reapplying", "warning"),
        ("rewound", "warning"),
        ("skipped_ahead", "warning"),
    ],
)
def test_partition_in_which_recovery_found_something_unusual_is_a_warning(found: str, level: str) -> None:
    (line,) = written(PartitionReady("orders[3]", found, 41))
    assert line == {
        "event": "partition_ready",
        "log_level": level,
        "partition": "orders[3]",
        "found": found,
        "start": 41,
    }
    assert (found in ORDINARY_FINDINGS) is (level == "info")


def test_event_reaches_every_listener_at_once_and_in_their_order() -> None:
    heard: list[tuple[str, Event]] = []
    emit = Events(lambda event: heard.append(("first", event)), lambda event: heard.append(("second", event)))
    one, other = StoredOutputsSent(1), StoredOutputsSent(2)
    emit(one)
    emit(other)
    assert heard == [("first", one), ("second", one), ("first", other), ("second", other)]


def test_event_without_a_listener_is_dropped() -> None:
    Events()(StoredOutputsSent(1))
