"""Charges at a payment gateway: SIGKILL at every step of the way, frozen and slow calls; one charge per message."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any

import pytest

from processor import failpoints
from tests.conftest import Deploy, Start
from tests.support import sending, sql
from tests.support.deployments import Deployment
from tests.support.gateway import Gateway
from tests.support.reading import read_all
from tests.support.sending import Sent
from tests.support.waiting import throughout

BATCH = 5
BEFORE_EACH_KILL = 8 * BATCH
LEASE_MS = 1_500


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as serving:
        yield serving


class Billing:
    """The billing example with a gateway of its own, the payments that were asked of it, and what must come of them."""

    def __init__(self, deployed: Deployment, gateway: Gateway) -> None:
        self.deployed = deployed
        self.gateway = gateway
        self.due: dict[str, dict[str, Any]] = {}  # by message id

    def send(self, count: int) -> None:
        first = len(self.due)
        records = [self.payment(number, number % self.deployed.partitions) for number in range(first, first + count)]
        sending.send(self.deployed.bootstrap_servers, self.deployed.input_topic, records)

    def payment(self, number: int, partition: int) -> Sent:
        customer = f"customer-{number % 7}"
        value = {"payment_id": f"payment-{number}", "customer": customer, "amount_cents": 100 + number}
        self.due[f"due-{number}"] = value
        return Sent(value, customer.encode(), "PaymentDue", f"due-{number}", partition=partition)

    def wait_until_done(self) -> None:
        self.deployed.verifier().wait_until_done(60)

    def inbox(self) -> list[dict[str, Any]]:
        """Rows of messages that are not plainly completed."""
        return [
            {**row, "error": json.loads(row["error"]) if row["error"] else None}
            for row in sql.fetch(self.deployed.database, "SELECT *, status::text AS status FROM inbox")
        ]

    def assert_charged_once(self) -> None:
        """Judged from the gateway's own records, the database and the output topic; the input says what is due."""
        asked = {(call.key, json.dumps(call.body, sort_keys=True)) for call in self.gateway.calls}
        assert asked == {(id_, json.dumps(value, sort_keys=True)) for id_, value in self.due.items()}
        assert self.gateway.charges.keys() == self.due.keys()
        expected = {
            (id_, value["payment_id"], value["amount_cents"], self.gateway.charges[id_]["id"])
            for id_, value in self.due.items()
        }
        rows = sql.fetch(self.deployed.database, "SELECT message_id, payment_id, amount_cents, gateway_id FROM charges")
        assert Counter(map(tuple, rows)) == Counter(expected)
        sent = Counter(
            (body["payment_id"], body["amount_cents"], body["gateway_id"])
            for body in (json.loads(output.value() or b"") for output in self._outputs())
        )
        assert sent == Counter((payment_id, amount, charge) for _, payment_id, amount, charge in expected)

    def outputs(self) -> int:
        return len(self._outputs())

    def _outputs(self) -> list[Any]:
        return read_all(self.deployed.bootstrap_servers, self.deployed.output_topic)


def billing(deployment: Deploy, gateway: Gateway, *, partitions: int = 2, **settings: Any) -> Billing:
    tables = {
        "handlers": {"PaymentDue": {"call": "tests.support.billing:charge", "effect": True}},
        "effects": {"lease_ms": LEASE_MS, "reap_ms": 300},
        "retry": {"attempts": 100},
        "batch": {"max_messages": BATCH},
        **settings,
    }
    deployed = deployment(partitions=partitions, settings=tables)
    deployed.environment["BILLING_GATEWAY_URL"] = gateway.url
    return Billing(deployed, gateway)


def test_killed_at_every_point_of_the_way_and_restarted_each_payment_is_charged_once(
    deployment: Deploy, start: Start, gateway: Gateway, subtests: pytest.Subtests
) -> None:
    # So many deaths in a row would be the fault of whatever was under way; here they are the test's.
    due = billing(deployment, gateway, failure={"quarantine_after": 100})
    # What they write goes by COPY, which nobody prepares, and goes out in one portion.
    never = ("after_prepare", "after_portion", "after_reposition", "before_forgetting", "after_forgetting")
    points = [point for point in failpoints.POINTS if point not in never]
    kills = [(point, 1 + index % 3) for index, point in enumerate(points)]
    kills += [("after_intent", 2), ("after_effect", 3)]
    for point, number in kills:
        with subtests.test(f"SIGKILL {point}@{number}"):
            due.send(BEFORE_EACH_KILL)
            doomed = start(due.deployed, failpoints=f"{point}=kill@{number}")
            assert doomed.wait(60) == -signal.SIGKILL, doomed.tail()
    start(due.deployed)
    due.wait_until_done()
    due.assert_charged_once()
    again = len(gateway.calls) - len(due.due)
    assert again > 0, "no process died between a call and its record, so this shows less than it says"
    assert again <= len(kills) * BATCH, "only what was under way when a process died may be asked for again"


def test_killed_during_the_call_the_lease_is_waited_for_and_then_taken_over(
    deployment: Deploy, start: Start, gateway: Gateway
) -> None:
    due = billing(deployment, gateway, effects={"lease_ms": 8_000, "reap_ms": 300})
    with gateway.blocked():
        due.send(1)
        doomed = start(due.deployed)
        gateway.wait_for_calls(1)
        doomed.kill()
    (row,) = due.inbox()
    assert row["status"] == "processing"
    heir = start(due.deployed)
    heir.wait_for_partitions(due.deployed.partitions)
    assert datetime.now(UTC) < row["lease_until"], "the lease was to be live when the next process comes along"
    due.wait_until_done()
    due.assert_charged_once()
    assert [call.at > row["lease_until"] for call in gateway.calls] == [False, True]


def test_call_that_takes_longer_than_the_lease_keeps_it_and_is_made_once(
    deployment: Deploy, start: Start, gateway: Gateway
) -> None:
    """Two processes, both of which look for expired leases."""
    due = billing(deployment, gateway)
    members = [start(due.deployed), start(due.deployed)]
    for member in members:
        member.wait_for_partitions(1)
    with gateway.blocked():
        due.send(1)
        gateway.wait_for_calls(1)
        throughout(
            lambda: len(gateway.calls) == 1 and [row["status"] for row in due.inbox()] == ["processing"],
            3 * LEASE_MS / 1000,
            lambda: f"one call and its row: {gateway.calls}, {due.inbox()}",
        )
    due.wait_until_done()
    due.assert_charged_once()
    assert len(gateway.calls) == 1
    for member in members:
        member.terminate()
        assert member.wait() == 0, member.tail()


def test_second_delivery_waits_for_the_call_of_another_process_and_is_skipped(
    deployment: Deploy, start: Start, gateway: Gateway
) -> None:
    due = billing(deployment, gateway)
    members = [start(due.deployed), start(due.deployed)]
    for member in members:
        member.wait_for_partitions(1)
    with gateway.blocked():
        both = [due.payment(0, partition=0), due.payment(0, partition=1)]
        sending.send(due.deployed.bootstrap_servers, due.deployed.input_topic, both)
        gateway.wait_for_calls(1)
        throughout(lambda: len(gateway.calls) == 1, 2 * LEASE_MS / 1000, "one call")
    due.wait_until_done()
    due.assert_charged_once()
    assert len(gateway.calls) == 1


def test_frozen_process_that_wakes_up_replaced_books_nothing_a_second_time(
    deployment: Deploy, start: Start, gateway: Gateway
) -> None:
    due = billing(deployment, gateway, kafka={"transaction_timeout_ms": 2_000})
    with gateway.blocked():
        due.send(1)
        zombie = start(due.deployed)
        gateway.wait_for_calls(1)
        zombie.stop()
    heir = start(due.deployed)
    due.wait_until_done()
    due.assert_charged_once()
    assert len(gateway.calls) == 2
    assigned = len(zombie.events("partitions_assigned"))
    zombie.cont()
    zombie.wait_for("partitions_assigned", count=assigned + 1)
    due.send(20)
    due.wait_until_done()
    due.assert_charged_once()
    for member in (zombie, heir):
        member.terminate()
        assert member.wait() == 0, member.tail()


def test_refused_charge_fails_its_message_and_nothing_is_booked_or_told(
    deployment: Deploy, start: Start, gateway: Gateway
) -> None:
    due = billing(deployment, gateway)
    with gateway.answering(HTTPStatus.PAYMENT_REQUIRED):
        due.send(1)
        start(due.deployed)
        due.wait_until_done()
    (row,) = due.inbox()
    assert (row["status"], row["attempts"], row["error"]["class"]) == ("failed", 1, "poison")
    assert (gateway.charges, due.outputs()) == ({}, 0)
    assert sql.value(due.deployed.database, "SELECT count(*) FROM charges") == 0
    assert len(gateway.calls) == 1


@pytest.mark.parametrize(
    ("status", "counted"),
    [(HTTPStatus.SERVICE_UNAVAILABLE, False), (HTTPStatus.INTERNAL_SERVER_ERROR, True)],
    ids=["unavailable", "failing"],
)
def test_gateway_in_trouble_is_asked_again_until_it_charges(
    status: HTTPStatus, counted: bool, deployment: Deploy, start: Start, gateway: Gateway
) -> None:
    due = billing(deployment, gateway, partitions=1)
    with gateway.answering(status):
        due.send(3)
        process = start(due.deployed)
        gateway.wait_for_calls(4)
    due.wait_until_done()
    due.assert_charged_once()
    most = max(row["attempts"] for row in due.inbox())
    assert (most > 1) == counted, process.tail()
    assert {row["status"] for row in due.inbox()} == {"completed"}
    assert not process.events("message_failed"), process.tail()
