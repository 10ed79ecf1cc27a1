"""What `processor status` makes of the facts: a word for each partition, and a sentence where something is wrong."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from processor.kafka.logs import End, Head
from processor.messages.message import Partition
from processor.messages.positions import CommittedOffset, metadata
from processor.operations.judging import InDatabase, InKafka, PartitionStatus, by_status, judged, start_of
from processor.operations.status import Report, Target
from processor.postgres.standing import Noted, Rows, Standing

NOW = datetime(2026, 1, 2, tzinfo=UTC)
AT = Partition("orders", 0)
OURS = CommittedOffset(10, metadata(3))


def standing(**changes: Any) -> Standing:
    usual = Standing("orders", 0, 7, [], 3, "id", 10, "host:1", 0, NOW - timedelta(seconds=5), True, [])
    return usual._replace(**changes)


def noted(**changes: Any) -> Noted:
    return Noted("orders", 0, "outage", "the gateway is down", NOW - timedelta(minutes=1), 3, True)._replace(**changes)


def in_kafka(committed: CommittedOffset | None = OURS, end: End = End(0, 10), **more: Any) -> InKafka:  # noqa: B008
    return InKafka({"orders": "id"}, [AT], {AT: committed}, {AT: end}, **more)


def one(database: InDatabase | None, kafka: InKafka | None, start: str = "earliest") -> PartitionStatus:
    (found,) = judged(database, kafka, start, NOW)
    return found


@pytest.mark.parametrize(
    ("stands", "trouble", "state", "why"),
    [
        (standing(), None, "running", ""),
        (standing(), noted(), "outage", "the gateway is down"),
        (standing(), noted(kind="halted"), "halted", "the gateway is down"),
        (standing(), noted(epoch=2), "running", ""),
        (standing(), noted(alive=False), "running", ""),
        (standing(alive=False), None, "no owner", "host:1, its last owner, has ended"),
        (
            standing(alive=False),
            noted(kind="halted", alive=False),
            "no owner",
            "host:1, its last owner, has ended with the partition halted: the gateway is down",
        ),
        (standing(alive=False), noted(epoch=2, alive=False), "no owner", "host:1, its last owner, has ended"),
        (standing(alive=False), noted(kind="recovering"), "recovering", "the gateway is down"),
        (None, None, "unowned", "no process has begun with it yet"),
        (None, noted(epoch=0, kind="halted"), "halted", "the gateway is down"),
    ],
    ids=[
        *("at work", "waits", "halted", "of an earlier owner", "its writer is gone", "no owner", "ended while halted"),
        *("no owner, and older trouble", "being taken over", "never begun", "halted before it ever began"),
    ],
)
def test_state_of_a_partition(stands: Standing | None, trouble: Noted | None, state: str, why: str) -> None:
    database = InDatabase([stands] if stands else [], [trouble] if trouble else [])
    found = one(database, in_kafka())
    assert (found.state, "; ".join(found.why)) == (state, why)


def test_lag_counts_up_to_the_last_stable_offset_and_its_age_is_that_of_the_next_record() -> None:
    head = {AT: Head(11, int((NOW - timedelta(seconds=90)).timestamp() * 1000))}
    found = one(InDatabase([standing()]), in_kafka(end=End(0, 15), heads=head))
    assert (found.lag, found.lag_seconds) == (5, 90.0)
    found = one(InDatabase([standing()]), in_kafka(end=End(0, 15), heads={AT: None}))
    assert (found.lag, found.lag_seconds) == (0, 0.0), "nothing but markers is left"
    found = one(InDatabase([standing()]), in_kafka(end=End(0, 15)))
    assert (found.lag, found.lag_seconds) == (5, None), "no broker has told"


def test_batches_wait_for_kafka_until_their_offset_is_committed_by_us() -> None:
    stands = standing(position=30, unsent=[10, 20, 30])
    assert one(InDatabase([stands]), in_kafka()).unsent == 2
    assert one(InDatabase([stands]), in_kafka(CommittedOffset(30, metadata(3)), End(0, 30))).unsent == 0
    assert one(InDatabase([stands]), None).unsent == 3, "nobody knows what Kafka has"


def test_offset_that_an_operator_has_set_is_where_work_goes_on() -> None:
    found = one(InDatabase([standing(alive=False)]), in_kafka(CommittedOffset(4, "")))
    assert (found.position, found.committed, found.lag) == (10, 4, 6)
    assert "its offset was set to 4: the next owner begins there" in found.why


@pytest.mark.parametrize(("start", "expected"), [("earliest", 2), ("latest", 9), ("fail", None)])
def test_partition_that_nobody_has_begun_begins_where_the_settings_say(start: str, expected: int | None) -> None:
    assert start_of(None, None, End(2, 9), start) == expected
    assert start_of(None, CommittedOffset(5, ""), End(2, 9), start) == 5


def test_what_kafka_has_no_longer_is_said() -> None:
    database = InDatabase([standing()])
    found = one(database, in_kafka(end=End(12, 15)))
    assert found.why == ["what lies between 10 and 12, where the log begins, has expired"]
    found = one(database, InKafka({"orders": "other"}, [AT], {AT: OURS}, {AT: End(0, 3)}))
    assert found.why == ["the topic was deleted and created anew: see `processor topic-recreated --dry-run`"]
    assert found.lag is None
    assert one(database, InKafka()).why == ["it does not exist in Kafka (any more)"]
    found = one(database, InKafka({"orders": "id"}, [AT], {AT: OURS}, unknown={AT: "no leader"}))
    assert (found.why, found.lag) == (["no leader"], None)


def test_without_postgres_kafka_still_tells_how_much_there_is_to_do() -> None:
    found = one(None, in_kafka(end=End(0, 12)))
    assert (found.state, found.position, found.committed, found.lag) == ("unknown", None, 10, 2)


def test_rows_of_an_earlier_topic_of_the_same_name_count_for_its_partition() -> None:
    rows = [Rows(7, "failed", 2, NOW), Rows(3, "failed", 1, NOW - timedelta(days=1)), Rows(7, "parked", 4, NOW)]
    found = one(InDatabase([standing(former=[3])], rows=rows), in_kafka())
    assert (found.failed, found.parked) == (3, 4)
    assert by_status(rows) == [("failed", 3, NOW - timedelta(days=1)), ("parked", 4, NOW)]


def partition(state: str, lag: int | None = 0, **more: Any) -> PartitionStatus:
    return PartitionStatus("orders", 0, state, lag=lag, **more)


@pytest.mark.parametrize(
    ("target", "partitions", "missing"),
    [
        ("ready", [partition("running", 5), partition("retry", 5)], []),
        ("ready", [partition("outage")], ["orders[0] outage"]),
        ("ready", [], ["no topic of this consumer exists"]),
        ("drained", [partition("no owner", 0)], []),
        ("drained", [partition("running", 0, unsent=2)], ["orders[0] lag 0, 2 batches wait for Kafka"]),
        ("drained", [partition("unknown", None)], ["orders[0] lag unknown"]),
        ("lag<5", [partition("running", 2), partition("running", 2)], []),
        ("lag < 5", [partition("running", 2), partition("running", 3)], ["lag 5"]),
        ("lag<5", [partition("running", 2), partition("running", None)], ["lag unknown"]),
    ],
)
def test_targets_of_wait(target: str, partitions: list[PartitionStatus], missing: list[str]) -> None:
    wanted = Target.parse(target)
    assert wanted is not None
    assert wanted.missing(Report("c", NOW, partitions)) == missing
    assert wanted.missing(Report("c", NOW, partitions, kafka="gone")) == ["gone"]


@pytest.mark.parametrize("text", ["", "lag", "lag<", "lag<-1", "lag>5", "done"])
def test_what_is_no_target(text: str) -> None:
    assert Target.parse(text) is None
