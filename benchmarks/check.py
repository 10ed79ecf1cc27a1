"""The judge: was every order done, and done once? A fast run that is wrong is no result.

Rows are read by SQL, outputs as any reader of committed records sees them; nothing is taken
from the subject's own reports.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

import orjson

from benchmarks.workload import Order

EXAMPLES = 3

Pair = tuple[str, Order]


def judge(
    expected: Mapping[str, Order],
    rows: Iterable[Pair],
    outputs: Iterable[Pair],
    stock: Mapping[str, int],
    inbox_rows: int | None = None,
    poison: int = 0,
) -> list[str]:
    """What is wrong, in words; empty if every order has one row, one output and its share of the stock."""
    found = [*_compare("row", expected, rows), *_compare("output", expected, outputs)]
    sums = Counter[str]()
    for order in expected.values():
        sums[order.sku] += order.quantity
    wrong = [
        f"{sku} has {stock.get(sku, 0)} reserved instead of {sums[sku]}"
        for sku in sorted(sums.keys() | stock.keys())
        if stock.get(sku, 0) != sums[sku]
    ]
    found += _shortened(wrong)
    records = len(expected) + poison
    if inbox_rows is not None and inbox_rows != records:
        found.append(f"{inbox_rows} inbox rows for {records} records")
    return found


def parse_output(key: bytes | None, value: bytes | None) -> Pair:
    """An output as the judge compares it; an unreadable one becomes an order that was never sent."""
    try:
        fields = orjson.loads(value or b"")
        order_id = fields["order_id"]
        if key != order_id.encode():
            return f"{order_id} under key {key!r}", Order(fields["sku"], fields["quantity"])
        return order_id, Order(fields["sku"], fields["quantity"])
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
        return f"unreadable {value!r}", Order("", 0)


def _compare(what: str, expected: Mapping[str, Order], found: Iterable[Pair]) -> list[str]:
    times = Counter[str]()
    wrong = []
    for order_id, order in found:
        times[order_id] += 1
        known = expected.get(order_id)
        if known is None:
            wrong.append(f"{what} for {order_id}, which was never ordered")
        elif known != order:
            wrong.append(f"{what} of {order_id} is {tuple(order)} instead of {tuple(known)}")
    lost = [f"no {what} for {order_id}" for order_id in expected if order_id not in times]
    doubled = [f"{number} {what}s for {order_id}" for order_id, number in times.items() if number > 1]
    return [*_shortened(lost), *_shortened(doubled), *_shortened(wrong)]


def _shortened(texts: list[str]) -> list[str]:
    if len(texts) <= EXAMPLES:
        return texts
    return [*texts[:EXAMPLES], f"… {len(texts)} like this"]
