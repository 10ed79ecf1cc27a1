"""What each client of Kafka is given."""

from __future__ import annotations

from pathlib import Path

from tests.support.configuration import KAFKA, settings, toml


def test_the_consumer_gets_what_exactly_once_needs(tmp_path: Path) -> None:
    text = toml(tables="[kafka.client]\nlinger.ms = 3\n[kafka.consumer]\nqueued.max.messages.kbytes = 99")
    config = settings(tmp_path, text).kafka.consumer_config("inventory")
    assert config == {
        "bootstrap.servers": "localhost:9092",
        "client.id": "inventory",
        "group.id": "inventory",
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": 10_000,
        "heartbeat.interval.ms": 250,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "queued.max.messages.kbytes": 99,
        "fetch.queue.backoff.ms": 50,
        "fetch.wait.max.ms": 100,
    }


def test_with_the_new_group_protocol_the_broker_decides(tmp_path: Path) -> None:
    config = settings(tmp_path, toml(kafka=f'{KAFKA}\ngroup_protocol = "consumer"')).kafka.consumer_config("a")
    assert config["group.protocol"] == "consumer"
    assert not {"session.timeout.ms", "partition.assignment.strategy"} & config.keys()


def test_the_producer_gets_what_exactly_once_needs(tmp_path: Path) -> None:
    text = toml(
        tables="[kafka.client]\nclient.rack = 'r'\nfetch.min.bytes = 2\nretries = 9\n"
        "[kafka.producer]\nqueue.buffering.max.ms = 4\nmessage.send.max.retries = 8\nacks = 'all'"
    )
    config = settings(tmp_path, text).kafka.producer_config("inventory-0")
    assert config == {
        "bootstrap.servers": "localhost:9092",
        "client.id": "inventory-0",
        "client.rack": "r",
        "transactional.id": "inventory-0",
        "transaction.timeout.ms": 15_000,
        "enable.idempotence": True,
        "acks": "all",
        "metadata.recovery.strategy": "none",
        "queue.buffering.max.ms": 4,
        "message.send.max.retries": 8,
        "delivery.report.only.error": True,
        "retry.backoff.ms": 2,
        "compression.type": "lz4",
    }
