"""Reads ranges of topics from beginning to end, once, and hands over each record as it came. Blocks; joins no group."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from processor.errors import BatchAborted
from processor.kafka import connections
from processor.kafka.final import raise_if_final
from processor.messages.message import Headers, Partition

if TYPE_CHECKING:
    from processor.settings.kafka import KafkaSettings

BITE = 2000
# After this long without a record or the end of a partition the brokers are taken to be gone.
SILENT_SECONDS = 30.0


class Scanned(NamedTuple):
    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers


def scan(
    settings: KafkaSettings, name: str, ranges: Mapping[Partition, range], each: Callable[[Scanned], None]
) -> None:
    """Call `each` with every committed record of these offsets."""
    config = settings.consumer_config(name) | {"enable.partition.eof": True}
    left = {partition: wanted.stop for partition, wanted in ranges.items() if wanted}
    consumer = Consumer(config, logger=connections.silent)
    try:
        consumer.assign([TopicPartition(at.topic, at.number, ranges[at].start) for at in left])
        while left:
            first = consumer.poll(SILENT_SECONDS)
            if first is None:
                raise BatchAborted(f"the brokers have sent nothing of {', '.join(map(str, left))} for a while")
            message: Any  # declared with optional values, but every message has them
            for message in (first, *consumer.consume(BITE, 0)):
                partition = Partition(message.topic(), message.partition())
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
                    raise_if_final(error)
                    continue
                if partition in left and error is None and message.offset() < left[partition]:
                    headers = tuple(message.headers() or ())
                    each(Scanned(partition.topic, message.key(), message.value(), headers))
                if partition in left and message.offset() + (error is None) >= left[partition]:
                    del left[partition]
                    consumer.pause([TopicPartition(partition.topic, partition.number)])
    except KafkaException as error:
        raise BatchAborted(f"the topics could not be read: {error.args[0].str()}") from None
    finally:
        consumer.close()
