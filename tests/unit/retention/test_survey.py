"""What may be forgotten: nothing that can still come within the time that was promised."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from processor.messages.message import Partition
from processor.messages.positions import CommittedOffset, Log, metadata
from processor.postgres.pruning import Known
from processor.retention.survey import Brokers, position, unclear, waiting_since

NOW = datetime(2026, 3, 20, 12, tzinfo=UTC)
DAY = timedelta(days=1)
ONE, OTHER = Partition("orders", 0), Partition("orders", 1)


def known(topic_id: str = "id") -> dict[Partition, Known]:
    return {at: Known(at.topic, at.number, topic_id, at.number + 10, [], 100, "me") for at in (ONE, OTHER)}


def brokers(**ends: int) -> Brokers:
    logs = {Partition("orders", number): Log("id", 0, end) for number, end in enumerate(ends.values())}
    return Brokers(logs, dict.fromkeys(logs))


@pytest.mark.parametrize(
    ("committed", "needed", "lowest"),
    [
        (None, None, 100),  # Kafka has forgotten the group: recovery goes on where the ledger stands
        (CommittedOffset(100, metadata(7)), None, 100),
        (CommittedOffset(90, metadata(7)), None, 90),  # the last batches are not published yet
        (CommittedOffset(40, ""), None, 40),  # moved back by an operator, not followed yet
        (CommittedOffset(140, metadata(7)), None, 100),  # the database was restored
        (CommittedOffset(100, metadata(7)), 30, 30),  # a replay
        (CommittedOffset(20, ""), 30, 20),
    ],
)
def test_position_is_the_lowest_that_is_still_to_be_read(
    committed: CommittedOffset | None, needed: int | None, lowest: int
) -> None:
    assert position(100, committed, needed) == lowest


def test_when_nothing_waits_the_time_ends_now() -> None:
    assert waiting_since(NOW, {10: 100, 11: 5}, {10: 100, 11: 5}, {10: NOW - DAY, 11: None}) == NOW


def test_partition_that_waits_counts_from_the_last_time_at_which_its_records_had_not_arrived() -> None:
    found = waiting_since(NOW, {10: 100, 11: 5}, {10: 101, 11: 5}, {10: NOW - DAY, 11: None})
    assert found == NOW - DAY


def test_the_longest_waiting_partition_counts() -> None:
    positions, ends = {10: 1, 11: 1, 12: 9}, {10: 2, 11: 2, 12: 9}
    assert waiting_since(NOW, positions, ends, {10: NOW - DAY, 11: NOW - 3 * DAY, 12: NOW - 9 * DAY}) == NOW - 3 * DAY


def test_partition_of_which_nobody_knows_since_when_it_waits_is_named() -> None:
    assert waiting_since(NOW, {10: 1, 11: 1}, {10: 2, 11: 2}, {10: NOW - DAY, 11: None}) == 11


def test_a_log_that_has_become_shorter_has_nothing_waiting() -> None:
    assert waiting_since(NOW, {10: 100}, {10: 90}, {10: None}) == NOW


def test_clear_when_each_partition_with_records_is_read_and_is_still_the_same() -> None:
    assert unclear(known(), brokers(a=10, b=10)) is None
    assert unclear(known(), brokers(a=10, b=10, empty=0)) is None


def test_unclear_while_a_partition_has_records_that_nobody_reads() -> None:
    assert unclear(known(), brokers(a=10, b=10, new=1)) == (
        "orders[2]: has records, and this consumer has not begun to read it"
    )


def test_unclear_when_a_topic_is_not_the_one_that_was_read() -> None:
    assert "created anew" in str(unclear(known("another"), brokers(a=10, b=10)))


def test_unclear_when_a_partition_is_gone() -> None:
    assert unclear(known(), brokers(a=10)) == "orders[1]: does not exist any more"
