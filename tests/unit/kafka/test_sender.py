from __future__ import annotations

from pathlib import Path

from processor.cli.deployment import load
from processor.kafka import properties, sender

CONFIG = """
consumer = "shop"
topic = "orders"
[handlers]
OrderPlaced = "shop:reserve"
[kafka]
bootstrap_servers = "127.0.0.1:1"
[kafka.producer]
delivery.timeout.ms = 7000
[database]
url = "postgresql://nobody@127.0.0.1:1/none"
"""


def test_producer_is_idempotent_without_transactions_and_keeps_what_was_configured(tmp_path: Path) -> None:
    (tmp_path / "orders.toml").write_text(CONFIG)
    found = sender.producer_config(load(tmp_path / "orders.toml").kafka, "shop")
    assert found["enable.idempotence"] is True
    assert found["acks"] == "all"
    assert not {"transactional.id", "transaction.timeout.ms", "delivery.report.only.error"} & found.keys()
    assert found["delivery.timeout.ms"] == 7000
    assert "message.timeout.ms" not in found
    assert properties.misfit("producer", found) is None
