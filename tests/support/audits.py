"""`processor verify` as tests run it, and the faults that it has to find."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from tests.support.bench import SECONDS, Bench
from tests.support.command import processor
from tests.support.deployments import PROJECT

CLEAN, FOUND = 0, 5


@dataclass(frozen=True, slots=True)
class Audited:
    """What `processor verify --json` says."""

    code: int
    said: dict[str, Any]

    @property
    def input(self) -> dict[str, int]:
        return {name: count for name, count in self.said["input"].items() if count}

    @property
    def outputs(self) -> dict[str, int]:
        return {name: count for name, count in self.said["outputs"].items() if count}

    @property
    def found(self) -> list[tuple[str, str, int, int, str | None]]:
        """Kind, coordinates and id of each finding."""
        names = ("kind", "topic", "partition", "offset", "id")
        return sorted(tuple(finding[name] for name in names) for finding in self.said["findings"])

    @property
    def why(self) -> str:
        return "\n".join(finding["why"] for finding in self.said["findings"])


async def audited(bench: Bench, *arguments: str) -> Audited:
    done = await asyncio.to_thread(
        processor, PROJECT, "verify", str(bench.config), "--json", "--output-topic", bench.output, *arguments
    )
    assert done.stderr == "", done.stderr
    return Audited(done.returncode, json.loads(done.stdout))


def output_headers(consumer: str, cause: str, place: int = 0) -> list[tuple[str, bytes]]:
    """The headers that an output of this consumer has, made without the processor's help."""
    key = hashlib.sha256(f"{consumer}:{cause}".encode()).hexdigest()[:32]
    return [("message-id", f"{key}-{place}".encode()), ("causation-id", cause.encode())]


def output_id(consumer: str, cause: str, place: int = 0) -> str:
    return output_headers(consumer, cause, place)[0][1].decode()


def plant_output(bench: Bench, headers: list[tuple[str, bytes]], *, commit: bool = True) -> int:
    """Put a record into the output topic as a transactional producer would; its offset."""
    offsets: list[Any] = []
    producer = Producer(
        {"bootstrap.servers": bench.bootstrap_servers, "transactional.id": f"{bench.consumer}-planted", "log_level": 0}
    )
    producer.init_transactions(SECONDS)
    producer.begin_transaction()
    producer.produce(
        bench.output,
        b"{}",
        headers=headers,  # type: ignore[arg-type]
        on_delivery=lambda _, message: offsets.append(message.offset()),
    )
    producer.flush(SECONDS)
    if commit:
        producer.commit_transaction(SECONDS)
    else:
        producer.abort_transaction(SECONDS)
    return int(offsets[0])


def commit_offset(bench: Bench, partition: int, offset: int) -> None:
    """As an operator does with Kafka's own tools, while nobody is in the group."""
    consumer = Consumer({"bootstrap.servers": bench.bootstrap_servers, "group.id": bench.consumer, "log_level": 0})
    try:
        consumer.commit(offsets=[TopicPartition(bench.input, partition, offset)], asynchronous=False)
    finally:
        consumer.close()
