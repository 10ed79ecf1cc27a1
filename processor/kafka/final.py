"""Errors of a consumer that no waiting helps against."""

from __future__ import annotations

import structlog
from confluent_kafka import KafkaError

from processor.errors import Halt, ProcessorError

log = structlog.get_logger()

_FORBIDDEN = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
)


class ConsumerDied(ProcessorError):
    """librdkafka's consumer reported a fatal error: stop, exit 1; a new process starts clean."""


def raise_if_final(error: KafkaError) -> None:
    """Raise an error that waiting does not cure; any other passes by itself."""
    if error.code() in _FORBIDDEN:
        raise Halt(f"the broker forbids it: {error.str()}; check the ACLs of this user")
    if error.fatal():
        raise ConsumerDied(f"the consumer cannot go on: {error.str()}")
    log.warning("consumer_error", code=error.name(), error=error.str())
