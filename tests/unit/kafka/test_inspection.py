from __future__ import annotations

import pytest

from processor.kafka.inspection import Access


@pytest.mark.parametrize(
    ("operations", "forbidden"),
    [({"READ", "DESCRIBE"}, False), ({"ALL"}, False), ({"DESCRIBE"}, True), (set(), False)],
    ids=["named", "all", "others only", "not reported"],
)
def test_only_a_permission_that_is_missing_among_others_is_known_to_be_denied(
    operations: set[str], forbidden: bool
) -> None:
    assert Access(1, frozenset(operations)).forbids("READ") is forbidden
