"""What librdkafka itself says about its properties."""

from __future__ import annotations

from pathlib import Path

import pytest

from processor.kafka import properties
from processor.settings.kafka import KafkaSettings


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_librdkafka_accepts_our_own_settings(protocol: str) -> None:
    kafka = KafkaSettings.model_validate({"bootstrap_servers": "localhost:1", "group_protocol": protocol})
    assert properties.misfit("consumer", kafka.consumer_config("a")) is None
    assert properties.misfit("producer", kafka.producer_config("a-0")) is None


@pytest.mark.parametrize(
    ("role", "config", "says"),
    [
        ("producer", {"transactional.id": "a", "message.timeout.ms": 90_000}, "message.timeout.ms"),
        (
            "consumer",
            {"group.id": "a", "security.protocol": "SASL_SSL", "ssl.ca.location": "/no"},
            "ssl.ca.location",
        ),
    ],
)
def test_properties_that_clash_are_found_offline(role: str, config: dict[str, object], says: str) -> None:
    assert says in str(properties.misfit(role, config))  # type: ignore[arg-type]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads where Linux shows them")
def test_asking_librdkafka_about_a_property_makes_no_client() -> None:
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert properties.refusal("socket.timeout.ms", 5000) is None
    assert len(list(Path("/proc/self/task").iterdir())) == threads
