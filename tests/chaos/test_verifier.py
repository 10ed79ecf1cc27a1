"""The judge is judged: it finds every fault that is planted, and takes nothing aborted for sent."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from confluent_kafka import Producer

from tests.conftest import Deploy
from tests.support import sql
from tests.support.deployments import PROJECT, Deployment
from tests.support.feed import Feed

ORDERS = 20


@dataclass
class World:
    """Input, rows and outputs as a perfect processor would have left them; a test spoils one thing."""

    deployed: Deployment
    orders: list[dict[str, Any]] = field(default_factory=list)

    def build(self) -> None:
        feed = _Recording(self.deployed.bootstrap_servers, self.deployed.input_topic, self.deployed.partitions)
        feed.send(ORDERS * 2)
        self.orders = feed.made
        for order in self.orders:
            self.reserve(order)
        self.sql(
            "UPDATE stock s SET reserved = (SELECT coalesce(sum(quantity), 0) FROM reservations WHERE sku = s.sku)"
        )

    def reserve(self, order: dict[str, Any]) -> None:
        self.sql(
            "INSERT INTO reservations (order_id, sku, quantity) VALUES ($1, $2, $3)",
            order["order_id"],
            order["sku"],
            order["quantity"],
        )

    def sql(self, statement: str, *arguments: Any) -> None:
        sql.execute(self.deployed.database, statement, *arguments)

    def send(self, orders: list[dict[str, Any]], *, commit: bool = True, **changes: Any) -> None:
        """One transaction with an output for each of these orders."""
        producer = Producer(
            {"bootstrap.servers": self.deployed.bootstrap_servers, "transactional.id": self.deployed.consumer}
        )
        producer.init_transactions()
        producer.begin_transaction()
        for order in orders:
            producer.produce(
                self.deployed.output_topic,
                json.dumps({**order, "left": 7} | changes.get("value", {})).encode(),
                changes.get("key", order["order_id"]).encode(),
                headers={
                    "message-id": changes.get("id", f"id-{order['order_id']}").encode(),
                    "type": changes.get("type", "OrderReserved").encode(),
                },
            )
        producer.flush()
        if commit:
            producer.commit_transaction()
        else:
            producer.abort_transaction()

    def faults(self) -> dict[str, list[str]]:
        return self.deployed.verifier().judge(everything=True).faults


class _Recording(Feed):
    def _new_order(self) -> dict[str, Any]:
        order = super()._new_order()
        self.made.append(order)
        return order

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made: list[dict[str, Any]] = []


@pytest.fixture
def world(deployment: Deploy) -> World:
    world = World(deployment(partitions=2))
    world.build()
    return world


def test_a_perfect_world_has_no_faults_though_the_input_has_duplicates(world: World) -> None:
    world.send(world.orders)
    report = world.deployed.verifier().judge(everything=True)
    assert not report.faults
    assert (report.orders, report.rows, report.outputs) == (len(world.orders),) * 3
    assert report.records == ORDERS * 2 > report.orders


Plant = Callable[[World], None]
ROW_FAULTS: dict[str, tuple[Plant, set[str]]] = {
    "a deleted row": (
        lambda world: world.sql("DELETE FROM reservations WHERE order_id = 'order-3'"),
        {"lost_rows", "wrong_sums"},
    ),
    "a doubled row": (lambda world: world.reserve(world.orders[3]), {"doubled_rows", "wrong_sums"}),
    "a row nobody ordered": (
        lambda world: world.reserve({"order_id": "order-x", "sku": "sku-1", "quantity": 1}),
        {"unexpected_rows", "wrong_sums"},
    ),
    "a row with another quantity": (
        lambda world: world.sql("UPDATE reservations SET quantity = 77 WHERE order_id = 'order-3'"),
        {"lost_rows", "unexpected_rows", "wrong_sums"},
    ),
    "stock taken twice": (
        lambda world: world.sql("UPDATE stock SET reserved = reserved + 1 WHERE sku = 'sku-1'"),
        {"wrong_sums"},
    ),
}


def test_every_fault_planted_in_postgres_is_found(world: World, subtests: pytest.Subtests) -> None:
    world.send(world.orders)
    for name, (plant, expected) in ROW_FAULTS.items():
        with subtests.test(name):
            world.sql("CREATE TABLE kept AS TABLE reservations")
            world.sql("CREATE TABLE kept_stock AS TABLE stock")
            plant(world)
            assert set(world.faults()) == expected
            world.sql("TRUNCATE reservations, stock")
            world.sql("INSERT INTO reservations TABLE kept; INSERT INTO stock TABLE kept_stock")
            world.sql("DROP TABLE kept, kept_stock")
    assert not world.faults()


OUTPUT_FAULTS: dict[str, tuple[Plant, set[str]]] = {
    "sent twice": (
        lambda world: world.send(world.orders[3:4], id="another"),
        {"doubled_outputs"},
    ),
    "sent twice under its old id": (
        lambda world: world.send(world.orders[3:4]),
        {"doubled_outputs", "doubled_output_ids"},
    ),
    "nobody ordered": (
        lambda world: world.send([{"order_id": "order-x", "sku": "sku-1", "quantity": 1}]),
        {"unexpected_outputs"},
    ),
    "another quantity": (
        lambda world: world.send(world.orders[3:4], id="another", value={"quantity": 77}),
        {"unexpected_outputs"},
    ),
    "another key": (
        lambda world: world.send(world.orders[3:4], id="another", key="order-4"),
        {"unexpected_outputs"},
    ),
    "another type": (
        lambda world: world.send(world.orders[3:4], id="another", type="OrderRejected"),
        {"unexpected_outputs"},
    ),
}


@pytest.mark.parametrize("fault", OUTPUT_FAULTS)
def test_every_fault_planted_in_the_output_is_found(fault: str, world: World) -> None:
    plant, expected = OUTPUT_FAULTS[fault]
    world.send(world.orders)
    plant(world)
    assert set(world.faults()) == expected


def test_a_missing_output_is_found_and_an_aborted_one_does_not_count_as_sent(world: World) -> None:
    world.send([order for order in world.orders if order["order_id"] != "order-3"])
    world.send(world.orders[3:4], commit=False)
    faults = world.faults()
    assert set(faults) == {"lost_outputs"}
    assert [text.partition(" ")[0] for text in faults["lost_outputs"]] == ["order-3"]


def test_an_aborted_attempt_before_the_committed_one_is_no_fault(world: World) -> None:
    world.send(world.orders, commit=False)
    world.send(world.orders)
    assert not world.faults()


def test_it_demands_nothing_beyond_the_committed_offsets_unless_told_to(world: World) -> None:
    world.sql("TRUNCATE reservations; UPDATE stock SET reserved = 0")
    assert not world.deployed.verifier().judge().faults
    assert set(world.faults()) == {"lost_rows", "lost_outputs"}


def test_it_shares_no_code_with_the_processor() -> None:
    code = "import sys, tests.support.verifier; print([m for m in sys.modules if m.split('.')[0] == 'processor'])"
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
