from __future__ import annotations

from processor.messages import identity
from processor.postgres.dead_letters import Filter


def test_a_status_alone_is_no_filter() -> None:
    assert not Filter(statuses=("failed",)).is_given()
    assert Filter(partition=0).is_given()
    assert Filter(key=b"").is_given()


def test_collisions_may_be_sent_only_where_they_are_named_and_allowed() -> None:
    key = identity.inbox_key("shop")("m1").hex()
    assert Filter(ids=("m1",)).allowed("shop") == []
    assert Filter(ids=("m1",), despite_collision=True).allowed("shop") == [key]
    assert Filter(ids=("m1",)).arguments("shop", [7])[:3] == [[7], ["failed", "parked"], [key]]
