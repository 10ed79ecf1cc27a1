"""Messages that failed, and partitions that wait or go no further: all that is decided without a look at Postgres."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from processor.engine.failing.bisect import Remaining
from processor.engine.failing.classify import Judge
from processor.engine.failing.pauses import PartitionPauses
from processor.engine.partitions import OwnedPartition, Partitions
from processor.errors import Halt, Reject, Retry
from processor.kafka.reader import PartitionReader
from processor.messages.batch import Batch
from processor.messages.record import Record
from processor.observe.events import Event, MessageRetried, PartitionHalted, PartitionHeld
from processor.observe.readiness import Readiness
from tests.unit.engine.conftest import TakeOver
from tests.unit.engine.given import FAILURE, UNUSED, current_reading, offsets, records_of, settings


@dataclass
class Given:
    pauses: PartitionPauses
    readiness: Readiness
    emitted: list[Event]


@pytest.fixture
def given(partitions: Partitions) -> Iterator[Given]:
    given = make(partitions)
    yield given
    given.pauses.close()


def make(partitions: Partitions, **failure: Any) -> Given:
    changed = settings(failure=failure, retry={"attempts": 3})
    readiness, emitted = Readiness(None), list[Event]()
    readiness.clear("starting")
    judge = Judge(changed)
    pauses = PartitionPauses(changed, partitions, UNUSED, UNUSED, UNUSED, judge, readiness, emitted.append)
    return Given(pauses, readiness, emitted)


def without_inbox(owned: OwnedPartition, count: int) -> list[Record]:
    """Their attempts are counted in memory."""
    records = records_of(current_reading(owned), *range(count))
    for record in records:
        record.in_inbox = False
    return records


async def until_due() -> None:
    """Let every wait end that was to last no time, each of them well."""
    loop, due, troubles = asyncio.get_running_loop(), asyncio.Event(), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, trouble: troubles.append(trouble))
    loop.call_later(0.001, due.set)
    await due.wait()
    assert troubles == []


# --- blame ---


async def test_message_that_is_bad_fails_and_the_rest_of_the_batch_is_tried_with_it(
    given: Given, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    records = without_inbox(owned, 4)
    remaining = Remaining(Batch.of_rows(records))
    remaining.part()
    remaining.narrow()
    await given.pauses.blame(remaining, records[1], Reject("no such sku"))
    assert records[1].failure is not None
    assert records[1].failure.detail == "no such sku"
    assert offsets(remaining.part()) == [0, 1, 2, 3]
    assert owned not in given.pauses


async def test_message_that_is_tried_again_holds_its_partition_from_there_on(given: Given, take_over: TakeOver) -> None:
    first, second = take_over(0, 1)
    records = [*without_inbox(first, 4), *without_inbox(second, 2)]
    remaining = Remaining(Batch.of_rows(records))
    await given.pauses.blame(remaining, records[2], Retry("not yet", after=7.0))
    left = remaining.part().as_rows()
    assert [(record.partition.number, record.message.offset) for record in left] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert (first.assignment.active, second.assignment.active) == (False, True)
    assert first.attempts == {2: 1}
    given.pauses.begin()
    assert first in given.pauses
    assert given.pauses.owned() == [first]
    assert given.emitted == [
        MessageRetried(records[2].message.id, "orders:0:2", 1, 7.0, "Retry: not yet"),
        PartitionHeld("orders[0]", 7.0, "one: Retry: not yet"),
    ]
    assert given.readiness.ready, "one message that waits is no outage"
    assert first.outages == 0


async def test_message_out_of_attempts_fails_for_good(given: Given, take_over: TakeOver) -> None:
    (owned,) = take_over(0)
    (record,) = without_inbox(owned, 1)
    for attempt in (1, 2):
        await given.pauses.blame(Remaining(Batch.of_rows([record])), record, Retry("not yet", after=0.0))
        assert (record.attempts, record.failure) == (attempt, None)
    await given.pauses.blame(Remaining(Batch.of_rows([record])), record, Retry("not yet"))
    assert record.failure is not None
    assert record.failure.kind == "transient"


async def test_failure_that_cannot_even_be_stored_halts_the_process(given: Given, take_over: TakeOver) -> None:
    (owned,) = take_over(0)
    (record,) = without_inbox(owned, 1)
    record.failure = FAILURE
    with pytest.raises(Halt, match=r"^orders:0:0: its failure cannot be stored either: too large$"):
        await given.pauses.blame(Remaining(Batch.of_rows([record])), record, ValueError("too large"))


# --- waiting ---


async def test_partition_is_read_again_from_its_position_when_the_wait_is_over(
    given: Given, partitions: Partitions, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    records = without_inbox(owned, 3)
    await given.pauses.blame(Remaining(Batch.of_rows(records)), records[2], Retry("not yet", after=0.0))
    owned.position = 2  # what came before it has been committed meanwhile
    given.pauses.begin()
    assert owned not in partitions.active()
    await until_due()
    assert owned in partitions.active()
    assert (owned.assignment.read, owned.position) == (2, 2)
    assert owned not in given.pauses


async def test_partition_that_was_given_back_while_it_waited_is_not_read_again(
    given: Given, reader: PartitionReader, take_over: TakeOver
) -> None:
    lost, kept = take_over(0, 1)
    for owned in (lost, kept):
        (record,) = without_inbox(owned, 1)
        await given.pauses.blame(Remaining(Batch.of_rows([record])), record, Retry("not yet", after=0.0))
    given.pauses.begin()
    reader.leave([lost.assignment])
    reader.disown([lost.assignment])
    assert given.pauses.owned() == [kept]
    await until_due()
    assert (lost.assignment.active, kept.assignment.active) == (False, True)
    assert lost not in given.pauses


# --- going no further ---


async def test_halted_partition_keeps_the_process_from_being_ready_and_says_why_once(
    given: Given, take_over: TakeOver
) -> None:
    first, second = take_over(0, 1)
    given.pauses.halt(first, "why")
    given.pauses.halt(first, "another reason")
    assert given.emitted == [PartitionHalted("orders[0]", "why")]
    assert (first.halted, first.assignment.active, second.assignment.active) == ("why", False, True)
    assert not given.readiness.ready
    given.pauses.raise_if_all_halted()


async def test_process_ends_when_all_of_its_partitions_are_halted(given: Given, take_over: TakeOver) -> None:
    first, second = take_over(0, 1)
    given.pauses.halt(first, "one reason")
    given.pauses.halt(second, "another")
    with pytest.raises(Halt, match=r"^orders\[0\]: one reason; orders\[1\]: another$"):
        given.pauses.raise_if_all_halted()


async def test_process_without_partitions_waits_for_some(given: Given) -> None:
    given.pauses.raise_if_all_halted()


async def test_halted_partition_that_is_given_back_is_the_next_owners_business(
    given: Given, reader: PartitionReader, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    given.pauses.halt(owned, "why")
    reader.leave([owned.assignment])
    reader.disown([owned.assignment])
    given.pauses.raise_if_all_halted()
    assert given.readiness.ready
    assert (owned in given.pauses, given.pauses.owned()) == (False, [])


async def test_partition_that_halts_while_it_waits_is_not_read_again(given: Given, take_over: TakeOver) -> None:
    first, second = take_over(0, 1)
    for owned in (first, second):
        (record,) = without_inbox(owned, 1)
        await given.pauses.blame(Remaining(Batch.of_rows([record])), record, Retry("not yet", after=0.0))
    given.pauses.begin()
    given.pauses.halt(first, "why")
    await until_due()
    assert (first.assignment.active, second.assignment.active) == (False, True)
    assert given.pauses.owned() == [first]


async def test_message_of_a_halted_partition_begins_no_wait(given: Given, take_over: TakeOver) -> None:
    (owned,) = take_over(0)
    (record,) = without_inbox(owned, 1)
    given.pauses.halt(owned, "why")
    await given.pauses.blame(Remaining(Batch.of_rows([record])), record, Retry("not yet", after=0.0))
    given.emitted.clear()
    given.pauses.begin()
    assert given.emitted == []


@pytest.mark.parametrize(("policy", "halted"), [("halt", True), ("dead-letter", False), ("park-key", False)])
async def test_record_that_cannot_be_decoded_halts_its_partition_by_policy(
    partitions: Partitions, take_over: TakeOver, policy: str, halted: bool
) -> None:
    given = make(partitions, policy=policy)
    first, second = take_over(0, 1)
    records = [*without_inbox(first, 4), *without_inbox(second, 2)]
    records[1].failure = records[3].failure = FAILURE
    batch = Batch.of_rows(records)
    remaining = Remaining(batch)
    given.pauses.halt_at_undecodable(remaining, batch)
    assert first.halted == ("orders:0:1: no such sku" if halted else None)
    assert second.halted is None
    assert offsets(remaining.part()) == ([0, 0, 1] if halted else [0, 1, 2, 3, 0, 1])


# --- outages ---


async def test_partition_that_commits_again_is_over_its_outage_but_not_over_its_halt(
    given: Given, take_over: TakeOver
) -> None:
    (owned,) = take_over(0)
    owned.outages = 4
    given.readiness.obstruct(owned, "the gateway is down")
    given.pauses.advanced(owned)
    assert (owned.outages, given.readiness.ready) == (0, True)
    given.pauses.halt(owned, "why")
    owned.outages = 1
    given.pauses.advanced(owned)
    assert (owned.outages, given.readiness.ready) == (0, False)
