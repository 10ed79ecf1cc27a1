"""The partitions that are ours: each reading leads to its owner for as long as somebody has records of it."""

from __future__ import annotations

import gc
import weakref

import pytest

from processor.engine.partitions import Obstacle, OwnedPartition, Partitions, Trouble
from processor.errors import Fenced
from processor.kafka.reader import PartitionReader
from processor.messages.message import Partition
from processor.messages.record import Reading
from tests.unit.engine.conftest import TakeOver
from tests.unit.engine.given import batch_of, current_reading

ORDERS = Partition("orders", 0)


def give_back(reader: PartitionReader, *owned: OwnedPartition) -> None:
    """As the group takes partitions away."""
    assignments = [one.assignment for one in owned]
    reader.leave(assignments)
    reader.disown(assignments)


# --- which are ours ---


async def test_assigned_partition_is_new_once_and_owned_from_then_on(
    reader: PartitionReader, partitions: Partitions
) -> None:
    reader.assign([ORDERS, Partition("orders", 1)])
    new = partitions.take_new()
    assert [one.partition for one in new] == [ORDERS, Partition("orders", 1)]
    assert partitions.take_new() == []
    assert partitions.owned() == new


async def test_partition_is_the_same_object_for_every_caller(reader: PartitionReader, partitions: Partitions) -> None:
    reader.assign([ORDERS])
    (before,) = partitions.owned()
    (new,) = partitions.take_new()
    before.position = 41
    assert new is before
    assert partitions.owned() == [before]


async def test_partition_is_active_while_it_is_read_and_not_while_it_waits(
    partitions: Partitions, take_over: TakeOver
) -> None:
    first, second = take_over(0, 1)
    assert partitions.active() == [first, second]
    partitions.suspend([first])
    assert partitions.active() == [second]
    partitions.begin(first, 9)
    assert (partitions.active(), first.position) == ([first, second], 9)


async def test_partition_that_comes_back_begins_with_nothing_of_the_last_time(
    reader: PartitionReader, partitions: Partitions, take_over: TakeOver
) -> None:
    (before,) = take_over(0)
    before.outages, before.attempts = 3, {7: 1}
    before.obstruct(Obstacle.HALTED, "by an operator")
    give_back(reader, before)
    assert (before.owned, before.leaving, partitions.owned()) == (False, True, [])
    (again,) = take_over(0)
    assert again is not before
    assert (again.outages, again.halted, again.attempts) == (0, None, {})


async def test_partition_that_is_to_be_given_back_is_not_begun_to_be_read(
    reader: PartitionReader, partitions: Partitions
) -> None:
    reader.assign([ORDERS])
    (owned,) = partitions.owned()
    reader.leave([owned.assignment])
    partitions.begin(owned, 5)
    assert (owned.assignment.reading, partitions.active(), partitions.take_new()) == (None, [], [])


# --- whose records these are ---


async def test_reading_carries_what_its_records_need_and_leads_to_its_partition(
    partitions: Partitions, take_over: TakeOver
) -> None:
    first, second = take_over(0, 1)
    reading = current_reading(second)
    assert (reading.partition, reading.partition_id, reading.topic_id, reading.epoch) == (
        Partition("orders", 1),
        8,
        "topic-1",
        3,
    )
    assert partitions.of(reading) is second
    assert partitions.of(current_reading(first)) is first


async def test_readings_of_one_partition_all_lead_to_it(partitions: Partitions, take_over: TakeOver) -> None:
    (owned,) = take_over(0)
    before = current_reading(owned)
    owned.epoch = 4
    partitions.begin(owned, 20)
    after = current_reading(owned)
    assert after is not before
    assert (before.epoch, after.epoch) == (3, 4), "a reading never changes"
    assert partitions.of(before) is partitions.of(after) is owned


async def test_record_of_an_earlier_assignment_belongs_to_that_one(
    reader: PartitionReader, partitions: Partitions, take_over: TakeOver
) -> None:
    (before,) = take_over(0)
    batch = batch_of(current_reading(before), 3)
    give_back(reader, before)
    (again,) = take_over(0)
    assert partitions.of(batch.readings()[ORDERS]) is before
    assert partitions.of(current_reading(again)) is again


async def test_reading_that_was_never_begun_has_no_partition(partitions: Partitions) -> None:
    with pytest.raises(KeyError):
        partitions.of(Reading(ORDERS, 7, "topic-1", 3, 7))


# --- what is kept ---


async def test_partition_that_is_given_back_is_kept_by_batches_of_its_records_alone(
    reader: PartitionReader, partitions: Partitions, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    batch = batch_of(current_reading(owned), 3)
    batch.as_rows()
    budget, reading = weakref.ref(owned.budget), weakref.ref(current_reading(owned))
    give_back(reader, owned)
    del owned
    assert partitions.take_new() == []
    gc.collect()
    assert partitions.of(batch.spans[0].reading).budget is budget()
    del batch
    gc.collect()
    assert (budget(), reading()) == (None, None)


async def test_earlier_readings_of_a_partition_are_forgotten_while_it_is_read_again_and_again(
    partitions: Partitions, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    readings = []
    for offset in range(5):
        partitions.begin(owned, offset)
        readings.append(weakref.ref(current_reading(owned)))
    gc.collect()
    assert [reading() is not None for reading in readings] == [False, False, False, False, True]


# --- use ---


async def test_partition_in_use_is_waited_for_until_it_is_released(
    reader: PartitionReader, partitions: Partitions, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    partitions.use([owned])
    assert not reader.wait_until_unused([owned.assignment], 0)
    partitions.release([owned])
    assert reader.wait_until_unused([owned.assignment], 0)


async def test_partition_that_is_to_be_given_back_is_not_used_anew(
    reader: PartitionReader, partitions: Partitions, take_over: TakeOver
) -> None:
    first, second = take_over(0, 1)
    with partitions.using([first, second]):
        assert (first.assignment.users, second.assignment.users) == (1, 1)
    reader.leave([second.assignment])
    with pytest.raises(Fenced), partitions.using([first, second]):
        pytest.fail("it was used")
    assert (first.assignment.users, second.assignment.users) == (0, 0)


async def test_partition_whose_position_is_outside_the_log_is_named_once_with_the_reason(
    partitions: Partitions, take_over: TakeOver
) -> None:
    _first, second, third = take_over(0, 1, 2)
    second.assignment.astray, third.assignment.astray = "out of range", "gone"
    assert partitions.take_astray() == {second: "out of range", third: "gone"}
    assert partitions.take_astray() == {}


def test_most_serious_trouble_of_a_partition_counts_and_is_as_old_as_its_first_reason(take_over: TakeOver) -> None:
    (owned,) = take_over(0)
    owned.obstruct(Obstacle.RETRY, "not yet")
    owned.obstruct(Obstacle.OUTAGE, "the gateway is down")
    first = owned.troubles[Obstacle.OUTAGE].since
    owned.obstruct(Obstacle.OUTAGE, "the gateway is still down")
    assert owned.trouble == (Obstacle.OUTAGE, Trouble("the gateway is still down", first))
    owned.obstruct(Obstacle.HALTED, "no such sku")
    assert owned.trouble == (Obstacle.HALTED, owned.troubles[Obstacle.HALTED])
    reasons = [owned.halted]
    owned.clear(Obstacle.HALTED, Obstacle.OUTAGE, Obstacle.RECOVERING)
    assert owned.trouble == (Obstacle.RETRY, owned.troubles[Obstacle.RETRY])
    reasons.append(owned.halted)
    assert reasons == ["no such sku", None]
