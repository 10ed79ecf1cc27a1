"""The orders that every subject gets."""

from __future__ import annotations

from benchmarks import workload


def test_orders_are_the_same_every_time_and_have_the_wanted_size() -> None:
    assert list(workload.orders(50)) == list(workload.orders(50))
    sizes = {len(value) for _, _, value in workload.orders(50, 1000)}
    assert min(sizes) > 980
    assert max(sizes) < 1020
    assert {order.sku for _, order, _ in workload.orders(500, skus=3)} == {"sku-0", "sku-1", "sku-2"}
    ids = [order_id for order_id, _, _ in workload.orders(50)]
    assert len(set(ids)) == 50
