"""Reads ranges of partitions, committed records only: a client of its own that joins no group and commits nothing.

All calls block, for `WAIT_SECONDS` at most unless they say otherwise.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from processor.errors import SetupError
from processor.kafka import connections

if TYPE_CHECKING:
    from confluent_kafka import Message

    from processor.messages.message import Partition
    from processor.settings.kafka import KafkaSettings

WAIT_SECONDS = 0.2
# Brokers may be restarted while we read; beyond this, somebody has to look.
SILENT_SECONDS = 60.0
ASK_SECONDS = 10.0
AT_ONCE = 4000

_FORBIDDEN = (KafkaError.TOPIC_AUTHORIZATION_FAILED, KafkaError.GROUP_AUTHORIZATION_FAILED)
_GONE = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION)  # noqa: SLF001


class Scan:
    """One range of one partition at a time."""

    def __init__(self, settings: KafkaSettings, name: str) -> None:
        own = {"enable.partition.eof": True, "fetch.wait.max.ms": 10}
        self._consumer = Consumer(settings.consumer_config(name) | own, logger=connections.silent)
        self._heard = 0.0
        self._range: tuple[Partition, int] | None = None
        self.position = 0  # everything below, from the start of the range on, has been given out or does not exist
        self.expired = 0  # offsets of the range that the log lost while we read

    def begin(self, partition: Partition, start: int, end: int) -> None:
        """Read from `start` until `end`, which may not lie beyond what committed readers see."""
        self._range = (partition, end)
        self.expired = 0
        self._assign(start)

    def more(self) -> list[Message] | None:
        """Return the next records, which may be none yet; None behind the last one."""
        assert self._range is not None
        partition, end = self._range
        if self.position >= end:
            self._range = None
            self._consumer.unassign()
            return None
        first = self._consumer.poll(WAIT_SECONDS)
        if first is None:
            if time.monotonic() - self._heard > SILENT_SECONDS:
                raise SetupError(
                    f"{partition}: nothing came from the brokers for {SILENT_SECONDS:.0f} s, at offset {self.position}"
                    f" of {end}; run the command again when they answer"
                )
            return []
        records = []
        for message in (first, *self._consumer.consume(AT_ONCE - 1, 0)):
            if (error := message.error()) is not None:
                self._judge(error, partition, message.offset() or 0)
                continue
            offset = message.offset()
            assert offset is not None
            if offset >= end:
                self.position = end
                break
            records.append(message)
            self.position = offset + 1
        if records:
            self._heard = time.monotonic()
        return records

    def close(self) -> None:
        self._consumer.close()

    def _assign(self, start: int) -> None:
        assert self._range is not None
        partition, _ = self._range
        self.position = start
        self._heard = time.monotonic()
        self._consumer.assign([TopicPartition(partition.topic, partition.number, start)])

    def _judge(self, error: KafkaError, partition: Partition, offset: int) -> None:
        """An error that passes by itself is waited out."""
        match error.code():
            case KafkaError._PARTITION_EOF:  # noqa: SLF001
                # Behind the last record there may be markers of transactions, from which no record comes.
                self.position = max(self.position, offset)
            case KafkaError._AUTO_OFFSET_RESET | KafkaError.OFFSET_OUT_OF_RANGE:  # noqa: SLF001
                start = self._log_start(partition)
                if start <= self.position:
                    raise SetupError(f"{partition}: offset {self.position} is outside of its log: was it truncated?")
                self.expired += start - self.position
                self._assign(start)
            case code if code in _FORBIDDEN:
                raise SetupError(f"{partition}: the broker forbids reading: {error.str()}; check this user's ACLs")
            case code if code in _GONE:
                raise SetupError(f"{partition} does not exist any more: {error.str()}")
            case _ if error.fatal():
                raise SetupError(f"{partition}: reading cannot go on: {error.str()}")

    def _log_start(self, partition: Partition) -> int:
        try:
            low, _ = self._consumer.get_watermark_offsets(
                TopicPartition(partition.topic, partition.number), ASK_SECONDS, cached=False
            )
        except KafkaException as error:
            raise SetupError(
                f"{partition}: the brokers do not report where its log begins: {error.args[0].str()}"
            ) from None
        return low
