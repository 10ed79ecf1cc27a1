"""Asks librdkafka whether it accepts properties, without a broker."""

from __future__ import annotations

import logging
from typing import Any, Literal

from confluent_kafka import Consumer, KafkaException, Producer

from processor.settings import librdkafka

END = "processor.end.of.properties"


def refusal(name: str, value: librdkafka.Value) -> str | None:
    """Return why librdkafka refuses this value of this property, or None. Makes no client and no connection."""
    # librdkafka checks properties in order, so an unknown one at the end stops it after it has checked the others and
    # before it builds a client.
    try:
        Producer({name: librdkafka.as_text(value), END: ""})
    except KafkaException as error:
        answer = str(error.args[0].str())
    if END in answer:
        return None
    if answer.startswith("No such configuration property"):
        hint = librdkafka.nearest(name)
        return "unknown librdkafka property" + (f"; did you mean {hint}?" if hint else "")
    if name in librdkafka.SECRETS:
        return "librdkafka refuses this value"
    return f"librdkafka refuses this value: {answer}"


def misfit(role: Literal["consumer", "producer"], config: dict[str, Any]) -> str | None:
    """Return why librdkafka refuses these properties together, such as an unreadable certificate or clashing timeouts.

    librdkafka decides that only when it builds a client. This one gets no broker and no SASL, so it connects to
    nothing and requests no token, and it is gone when this returns.
    """
    offline = {
        name: value
        for name, value in config.items()
        if not name.startswith("sasl.") and name not in ("bootstrap.servers", "enable.metrics.push")
    }
    protocol = str(config.get("security.protocol", "plaintext")).upper()
    offline["security.protocol"] = protocol.removeprefix("SASL_")
    silent = logging.Logger("processor.kafka.properties", level=logging.CRITICAL + 1)
    try:
        if role == "consumer":
            Consumer(offline, logger=silent).close()
        else:
            Producer(offline, logger=silent)
    except KafkaException as error:
        return " ".join(str(error.args[0].str()).split())
    return None
