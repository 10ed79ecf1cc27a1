"""What a process has done since it started: the sums of what its batches had."""

from __future__ import annotations

from dataclasses import asdict, fields

import pytest

from processor.observe.counters import Counters
from processor.observe.events import (
    BatchCommitted,
    BatchRetried,
    Event,
    MessageCollided,
    MessageFailed,
    MessageParked,
    MessageRetried,
    Progress,
    StoredOutputsSent,
)

BATCH = BatchCommitted(
    records=100,
    completed=60,
    duplicates=20,
    failed=10,
    parked=5,
    collisions=3,
    outputs=70,
    round_trips={"begin": 1, "claim": 2, "commit": 1},
)
RETRIED = MessageRetried("id", "orders:0:7", 1, 0.5, "not yet")


def counted(*events: Event) -> Progress:
    counters = Counters()
    for event in events:
        counters(event)
    return counters.progress()


def test_process_that_has_done_nothing_counts_nothing() -> None:
    numbers = asdict(counted())
    assert numbers.pop("round_trips") == {}
    assert set(numbers.values()) == {0}


def test_batches_add_up_number_by_number() -> None:
    trips = {"begin": 2, "handlers": 7}
    more = BatchCommitted(9, 8, 7, 6, 5, collisions=4, outputs=3, round_trips=trips)
    assert counted(BATCH, RETRIED, more, RETRIED, RETRIED) == Progress(
        records=109,
        completed=68,
        duplicates=27,
        failed=16,
        parked=10,
        retried=3,
        collisions=7,
        outputs=73,
        batches=2,
        round_trips={"begin": 3, "claim": 2, "commit": 1, "handlers": 7},
    )


@pytest.mark.parametrize(
    "event",
    [
        BatchRetried("deadlock", 1, 100),
        MessageFailed("id", "orders:0:7", "rejected", "no such sku"),
        MessageParked("id", "orders:0:7"),
        MessageCollided("id", "orders:0:7"),
        StoredOutputsSent(5),
    ],
    ids=lambda event: str(event.name),
)
def test_what_a_committed_batch_says_of_its_messages_is_counted_once(event: Event) -> None:
    assert counted(BATCH, event) == counted(BATCH)


def test_progress_has_every_number_that_is_counted() -> None:
    assert [field.name for field in fields(Progress)] == [field.name for field in fields(Counters)]
