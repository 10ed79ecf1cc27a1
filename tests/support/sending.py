"""Records as a test wants them: any bytes, any headers, to a partition of its choice."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, Message, Producer

SECONDS = 60.0
AT_ONCE = 20_000


@dataclass
class Sent:
    value: Any = None
    key: bytes | None = b"k"
    type: str | None = "T"
    id: str | None = None
    headers: list[tuple[str, bytes | None]] = field(default_factory=list)
    partition: int = 0

    def payload(self) -> bytes | None:
        """Its value as it goes out; what is not bytes already goes as JSON."""
        if self.value is None or isinstance(self.value, bytes):
            return self.value
        return json.dumps(self.value).encode()

    def all_headers(self) -> list[tuple[str, bytes | None]]:
        headers = list(self.headers)
        if self.type is not None:
            headers.append(("type", self.type.encode()))
        if self.id is not None:
            headers.append(("message-id", self.id.encode()))
        return headers


class Place(NamedTuple):
    """Where the broker has put a record, and the time it carries."""

    partition: int
    offset: int
    timestamp_ms: int


def send(bootstrap_servers: str, topic: str, records: Iterable[Sent]) -> list[Place]:
    """Send them in order and wait until the broker has them; where each of them is."""
    producer = Producer(
        {"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "linger.ms": 5, "log_level": 0}
    )
    places: list[Place | None] = []
    for index, record in enumerate(records):
        if index % AT_ONCE == 0:
            assert producer.flush(SECONDS) == 0
        places.append(None)
        producer.produce(
            topic,
            record.payload(),
            record.key,
            record.partition,
            headers=record.all_headers(),  # type: ignore[arg-type]
            on_delivery=_note(places, index),
        )
    assert producer.flush(SECONDS) == 0
    return [place for place in places if place is not None]


def _note(places: list[Place | None], index: int) -> Any:
    def delivered(error: KafkaError | None, message: Message) -> None:
        assert error is None, error
        partition, offset = message.partition(), message.offset()
        assert partition is not None
        assert offset is not None
        places[index] = Place(partition, offset, message.timestamp()[1])

    return delivered
