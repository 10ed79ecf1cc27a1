"""Which keys wait behind a failed message, as far as this process remembers."""

from __future__ import annotations

import pytest

from processor.engine.failing.parking import Parking
from processor.engine.partitions import Partitions
from processor.postgres.parked_keys import digest
from tests.unit.engine.conftest import TakeOver
from tests.unit.engine.given import current_reading, records_of, settings


def parking(partitions: Partitions, policy: str) -> Parking:
    return Parking(settings(failure={"policy": policy}), partitions)


@pytest.mark.parametrize(("policy", "parks"), [("park-key", True), ("dead-letter", False), ("halt", False)])
async def test_keys_are_parked_by_one_policy_only(partitions: Partitions, policy: str, parks: bool) -> None:
    assert parking(partitions, policy).parks is parks


async def test_key_of_a_failed_message_is_remembered_in_its_own_partition(
    partitions: Partitions, take_over: TakeOver
) -> None:
    first, second = take_over(0, 1)
    parking(partitions, "park-key").remember(records_of(current_reading(first), 5))
    assert (first.parked_keys, second.parked_keys) == ({digest(b"k5")}, set())


@pytest.mark.parametrize("policy", ["dead-letter", "halt"])
async def test_under_another_policy_only_keys_that_wait_already_are_remembered(
    partitions: Partitions, take_over: TakeOver, policy: str
) -> None:
    (owned,) = take_over(0)
    failed, waiting = records_of(current_reading(owned), 5, 6)
    waiting.parked = True
    parking(partitions, policy).remember([failed, waiting])
    assert owned.parked_keys == {digest(b"k6")}


async def test_message_without_a_key_holds_up_nobody(partitions: Partitions, take_over: TakeOver) -> None:
    (owned,) = take_over(0)
    (record,) = records_of(current_reading(owned), 5)
    record.message.key = None
    parking(partitions, "park-key").remember([record])
    assert owned.parked_keys == set()
