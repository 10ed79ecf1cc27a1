"""The judge of exactly-once: an independent reader that shares no code with the processor.

What should be there follows from the input topic alone: every distinct event id is one order, which must
have one row in `reservations` and one `OrderReserved` record in the output topic. What is there is read from
Postgres and, as any downstream consumer would, from Kafka with `read_committed`.

It may look at any time, also while work goes on: an order whose records all lie below the committed offsets
must be there, above them nothing need be, and nothing may ever be there twice.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from confluent_kafka import Consumer, IsolationLevel, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from tests.support import sql
from tests.support.reading import READ_SECONDS, header, offset_of, partition_of, partitions, read_all
from tests.support.waiting import eventually

SHOWN = 5

Order = tuple[str, str, int]


@dataclass(frozen=True)
class Report:
    """Everything that is wrong; each entry names one order, row or record."""

    lost_rows: list[str]
    doubled_rows: list[str]
    unexpected_rows: list[str]
    lost_outputs: list[str]
    doubled_outputs: list[str]
    unexpected_outputs: list[str]
    doubled_output_ids: list[str]
    wrong_sums: list[str]
    orders: int = 0
    records: int = 0
    rows: int = 0
    outputs: int = 0

    @property
    def faults(self) -> dict[str, list[str]]:
        named = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: found for name, found in named.items() if isinstance(found, list) and found}

    def __str__(self) -> str:
        counted = f"{self.orders} orders in {self.records} records, {self.rows} rows, {self.outputs} outputs"
        lines = [
            f"{name}: {len(found)}, such as {', '.join(found[:SHOWN])}" for name, found in sorted(self.faults.items())
        ]
        return "; ".join([counted, *lines])


class Verifier:
    def __init__(self, bootstrap_servers: str, input_topic: str, output_topic: str, group: str, database: str) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._input = input_topic
        self._output = output_topic
        self._group = group
        self._database = database
        # Asks about the group without ever joining it.
        self._group_reader = Consumer(
            {
                "bootstrap.servers": bootstrap_servers,
                "group.id": group,
                "isolation.level": "read_uncommitted",
                "enable.auto.commit": False,
                "log_level": 0,
            }
        )
        self._admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})

    def assert_exactly_once(self, seconds: float = 45.0) -> Report:
        """Wait until the group has committed all input, then demand that every order counted once."""
        self.wait_until_done(seconds)
        report = self.judge(everything=True)
        assert not report.faults, str(report)
        return report

    def wait_until_done(self, seconds: float = 45.0) -> None:
        """Until the committed offsets stand at the ends of the input and no transaction is open on the output."""
        eventually(self.is_done, seconds, self._unfinished)

    def wait_until_committed(self, more: int, seconds: float = 45.0) -> None:
        """Until the group has committed this many records more than now."""
        so_far = sum(self.committed().values())
        eventually(lambda: sum(self.committed().values()) >= so_far + more, seconds, self._unfinished)

    def is_done(self) -> bool:
        ends = self._ends(self._input)
        committed = self.committed()
        return all(committed.get(p, 0) == end for p, end in ends.items()) and not self.open_transactions()

    def committed(self) -> dict[int, int]:
        """What the group has committed; offsets in a transaction that is still open do not count."""
        parts = [TopicPartition(self._input, number) for number in partitions(self._admin, self._input)]
        found: dict[int, int] = {}

        def answered() -> bool:
            try:
                answer = self._group_reader.committed(parts, READ_SECONDS)
            except KafkaException:  # the coordinator is on its way up
                return False
            found.update({at.partition: at.offset for at in answer if at.offset >= 0})
            return True

        eventually(answered, READ_SECONDS, "an answer of the group's coordinator")
        return found

    def open_transactions(self) -> list[int]:
        """Partitions of the output where committed readers stand still before the end."""
        ends = self._ends(self._output)
        stable = self._ends(self._output, committed=True)
        return [partition for partition, end in ends.items() if stable[partition] < end]

    def judge(self, *, everything: bool = False) -> Report:
        """Compare what is there with what the input demands: of all of it, or of what is committed so far.

        What is demanded is read first and what explains it last, so that progress meanwhile cannot look like a fault.
        """
        committed = self._ends(self._input) if everything else self.committed()
        rows: list[Order] = [
            (row["order_id"], row["sku"], row["quantity"])
            for row in sql.fetch(self._database, "SELECT order_id, sku, quantity FROM reservations")
        ]
        stock = {
            row["sku"]: (row["reserved"], row["summed"])
            for row in sql.fetch(
                self._database,
                "SELECT sku, reserved, coalesce((SELECT sum(quantity) FROM reservations r WHERE r.sku = s.sku), 0)"
                " AS summed FROM stock s",
            )
        }
        outputs = read_all(self._bootstrap_servers, self._output)
        inputs = read_all(self._bootstrap_servers, self._input)

        events: dict[str, Order] = {}
        unfinished: set[str] = set()
        for message in inputs:
            body = _json(message)
            events.setdefault(body["event_id"], (body["order_id"], body["sku"], body["quantity"]))
            if offset_of(message) >= committed.get(partition_of(message), 0):
                # Even if a duplicate of it is committed on another partition: the outputs go with the first.
                unfinished.add(body["event_id"])
        orders = set(events.values())
        demanded = {order for event_id, order in events.items() if event_id not in unfinished}

        row_counts = Counter(rows)
        sent = Counter(_announced(message) for message in outputs)
        ids = Counter(header(message, "message-id") for message in outputs)
        return Report(
            lost_rows=_names(order for order in demanded if order not in row_counts),
            doubled_rows=_names(order for order, count in row_counts.items() if count > 1),
            unexpected_rows=_names(order for order in row_counts if order not in orders),
            lost_outputs=_names(order for order in demanded if order not in sent),
            doubled_outputs=_names(order for order, count in sent.items() if count > 1),
            unexpected_outputs=_names(order for order in sent if order not in orders),
            doubled_output_ids=sorted(str(id_) for id_, count in ids.items() if count > 1 or id_ is None),
            wrong_sums=[f"{sku} {is_} != {sum_}" for sku, (is_, sum_) in sorted(stock.items()) if is_ != sum_],
            orders=len(orders),
            records=len(inputs),
            rows=len(rows),
            outputs=len(outputs),
        )

    def _ends(self, topic: str, *, committed: bool = False) -> dict[int, int]:
        """Where the log ends: for everybody, or for readers of committed data."""
        level = IsolationLevel.READ_COMMITTED if committed else IsolationLevel.READ_UNCOMMITTED
        latest: Callable[[], OffsetSpec] = OffsetSpec.latest
        futures = self._admin.list_offsets(
            {TopicPartition(topic, partition): latest() for partition in partitions(self._admin, topic)},
            isolation_level=level,
        )
        return {at.partition: future.result().offset for at, future in futures.items()}

    def _unfinished(self) -> str:
        stand = {
            partition: (self.committed().get(partition), end) for partition, end in self._ends(self._input).items()
        }
        ledger = sql.fetch(
            self._database,
            "SELECT partition, epoch, first_offset, next_offset, owner,"
            " (SELECT count(*) FROM unsent WHERE unsent.partition_id = ledger.partition_id) AS stored FROM ledger"
            " ORDER BY partition",
        )
        rows = "; ".join(str(dict(row)) for row in ledger)
        return (
            f"all input committed: (committed, end) by partition {stand}; open transactions on output partitions "
            f"{self.open_transactions()}; ledger {rows}"
        )


def _announced(message: Message) -> Order:
    """The order an output is about; one with a wrong key or type is about none and so unexpected."""
    body: Mapping[str, Any] = _json(message)
    key = message.key()
    key_text = key.decode() if isinstance(key, bytes) else str(key)
    if key_text != body.get("order_id") or header(message, "type") != "OrderReserved":
        return f"{key_text}:{header(message, 'type')}", str(body.get("sku")), int(body.get("quantity", 0))
    return body["order_id"], body["sku"], body["quantity"]


def _json(message: Message) -> Any:
    return json.loads(message.value() or b"{}")


def _names(orders: Any) -> list[str]:
    return sorted(f"{order_id} ({quantity} of {sku})" for order_id, sku, quantity in orders)
