from __future__ import annotations

from pathlib import Path

from processor.kafka import sender
from processor.settings import config, librdkafka

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
    properties = sender.producer_config(config.load(tmp_path / "orders.toml", environ={}).kafka, "shop")
    assert properties["enable.idempotence"] is True
    assert properties["acks"] == "all"
    assert not {"transactional.id", "transaction.timeout.ms", "delivery.report.only.error"} & properties.keys()
    assert properties["delivery.timeout.ms"] == 7000
    assert "message.timeout.ms" not in properties
    assert librdkafka.misfit("producer", properties) is None
