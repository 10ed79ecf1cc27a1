"""The judge: what is lost, doubled or wrong is reported."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from benchmarks import check
from benchmarks.workload import Order

ORDERS = {"o-1": Order("sku-1", 2), "o-2": Order("sku-1", 3), "o-3": Order("sku-2", 1)}
STOCK = {"sku-1": 5, "sku-2": 1}

Pairs = list[check.Pair]


def pairs() -> Pairs:
    return list(ORDERS.items())


def test_a_complete_run_is_right() -> None:
    assert check.judge(ORDERS, pairs(), pairs(), STOCK, inbox_rows=3) == []


CHANGES: dict[str, tuple[Callable[[Pairs], object], str]] = {
    "lost": (lambda found: found.pop(), "no {} for o-3"),
    "doubled": (lambda found: found.append(found[0]), "2 {}s for o-1"),
    "wrong": (lambda found: found.__setitem__(1, ("o-2", Order("sku-1", 4))), "{} of o-2 is ('sku-1', 4) instead of"),
    "never ordered": (lambda found: found.append(("o-9", Order("sku-1", 1))), "{} for o-9, which was never ordered"),
}


@pytest.mark.parametrize("what", ["row", "output"])
@pytest.mark.parametrize("case", CHANGES)
def test_what_is_lost_doubled_or_wrong_is_seen(what: str, case: str) -> None:
    change, expected = CHANGES[case]
    rows, outputs = pairs(), pairs()
    change(rows if what == "row" else outputs)
    (problem,) = check.judge(ORDERS, rows, outputs, STOCK)
    assert problem.startswith(expected.format(what))


def test_stock_that_does_not_add_up_is_seen() -> None:
    (problem,) = check.judge(ORDERS, pairs(), pairs(), STOCK | {"sku-2": 2})
    assert problem == "sku-2 has 2 reserved instead of 1"


def test_a_missing_inbox_row_is_seen() -> None:
    assert check.judge(ORDERS, pairs(), pairs(), STOCK, inbox_rows=2) == ["2 inbox rows for 3 records"]


def test_many_problems_are_counted_not_listed() -> None:
    problems = check.judge(ORDERS | {f"x-{n}": Order("sku-3", 0) for n in range(50)}, pairs(), pairs(), STOCK)
    assert "… 50 like this" in problems
    assert len(problems) < 10


@pytest.mark.parametrize(
    ("key", "value"),
    [(b"o-1", b"not json"), (b"o-1", None), (b"o-1", b"[]"), (b"o-2", b'{"order_id":"o-1","sku":"s","quantity":1}')],
)
def test_an_output_that_cannot_be_read_or_has_another_key_was_never_ordered(key: bytes, value: bytes | None) -> None:
    order_id, _ = check.parse_output(key, value)
    assert order_id not in ORDERS
