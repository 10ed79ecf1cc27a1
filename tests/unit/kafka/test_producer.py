"""What errors of the producer mean."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from processor.kafka.producer import ProducerAction, action_after


@pytest.mark.parametrize(
    "code",
    [KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION, KafkaError.UNKNOWN_TOPIC_OR_PART],
)
def test_topic_that_is_gone_halts_nothing_because_it_may_be_created_again(code: int) -> None:
    assert action_after(KafkaError(code)) is ProducerAction.REBUILD
