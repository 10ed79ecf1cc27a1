"""How many batches run alone after a deadlock."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from processor.postgres.deadlocks import FIRST_ALONE, MOST_ALONE, DeadlockGate
from processor.settings.load import load

ORDERS = Path(__file__).parents[3] / "config" / "orders.toml"


@pytest.fixture
def turns() -> DeadlockGate:
    return DeadlockGate(load(ORDERS, {}), cast(Any, None))


def alone_after_deadlock(turns: DeadlockGate) -> int:
    """Commits as many batches as are to run alone, and counts them."""
    turns.deadlocked()
    count = 0
    while "_xact_lock_shared" not in turns.begin_sql():
        turns.committed()
        count += 1
    return count


def calm(turns: DeadlockGate, batches: int) -> None:
    for _ in range(batches):
        turns.committed()


def test_deadlocks_one_behind_the_other_make_the_lone_stretches_longer_up_to_a_bound(turns: DeadlockGate) -> None:
    found = [alone_after_deadlock(turns) for _ in range(9)]
    assert found == [16, 32, 64, 128, 256, 512, 1024, 1024, 1024]


def test_worker_of_some_weeks_runs_as_few_batches_alone_after_a_deadlock_as_a_new_one(turns: DeadlockGate) -> None:
    for _ in range(20):
        assert alone_after_deadlock(turns) == FIRST_ALONE
        calm(turns, 10_000)


def test_lone_stretches_get_shorter_with_each_stretch_beside_others_that_is_as_long(turns: DeadlockGate) -> None:
    for _ in range(8):
        alone_after_deadlock(turns)
    calm(turns, MOST_ALONE)
    assert alone_after_deadlock(turns) == MOST_ALONE // 2
    calm(turns, MOST_ALONE - 1)
    assert alone_after_deadlock(turns) == MOST_ALONE, "it came again too soon"
