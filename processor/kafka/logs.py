"""What the logs of partitions hold, for commands that only look: their ends, the offset at a time, the next record.

All of it as readers of committed records see it. A transaction leaves a marker behind its last record, and markers take
up offsets: a topic that was read to its end has offsets left that no record ever comes from. Only reading shows that,
by a Consumer that is in no group. All calls block, each within a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import (
    OFFSET_INVALID,
    Consumer,
    IsolationLevel,
    KafkaError,
    KafkaException,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]

from processor.errors import SetupError
from processor.kafka import connections
from processor.kafka.inspection import COORDINATOR_MOVES
from processor.messages.message import Partition
from processor.messages.positions import CommittedOffset

if TYPE_CHECKING:
    from processor.settings.kafka import KafkaSettings

TIMEOUT_SECONDS = 10.0
POLL_SECONDS = 0.1
_END = KafkaError._PARTITION_EOF  # noqa: SLF001


@dataclass(frozen=True, slots=True)
class End:
    """Where the log of a partition begins, and where it ends for readers of committed records."""

    start: int
    stable: int  # the last stable offset


@dataclass(frozen=True, slots=True)
class Head:
    """The first record at or after an offset."""

    offset: int
    timestamp_ms: int | None


class Logs:
    def __init__(self, settings: KafkaSettings, group: str) -> None:
        self._admin = AdminClient(settings.admin_config(), logger=connections.silent)
        config = settings.consumer_config(group)
        # Committed offsets as they are now: `read_committed` would wait for every transaction that is open.
        self._group = Consumer(config | {"isolation.level": "read_uncommitted"}, logger=connections.silent)
        one_record = {"enable.partition.eof": True, "fetch.message.max.bytes": 65_536, "queued.min.messages": 1}
        self._reader = Consumer(config | one_record, logger=connections.silent)

    def topics(self, names: Iterable[str]) -> dict[str, tuple[str, list[int]]]:
        """Return id and partitions of the topics that exist."""
        found = {}
        asked = self._admin.describe_topics(TopicCollection(sorted(set(names))), request_timeout=TIMEOUT_SECONDS)
        for name, future in asked.items():
            try:
                topic: Any = future.result()
            except KafkaException as error:
                if error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                    raise _trouble(f"the brokers do not describe {name}", error) from None
            else:
                id_ = str(topic.topic_id).replace("+", "-").replace("/", "_")
                found[name] = id_, sorted(partition.id for partition in topic.partitions)
        return found

    def ends(self, partitions: Iterable[Partition]) -> tuple[dict[Partition, End], dict[Partition, str]]:
        """Return the ends of the logs; and for partitions without a leader why there is no answer."""
        unknown: dict[Partition, str] = {}
        starts = self._offsets(partitions, OffsetSpec.earliest(), unknown)  # type: ignore[no-untyped-call]
        ends = self._offsets(starts, OffsetSpec.latest(), unknown)  # type: ignore[no-untyped-call]
        return {at: End(starts[at], end) for at, end in ends.items()}, unknown

    def at_time(self, partitions: Iterable[Partition], timestamp_ms: int) -> dict[Partition, int]:
        """Return the offset of the first record with this time or a later one; the end of the log if there is none."""
        found = self._offsets(partitions, OffsetSpec.for_timestamp(timestamp_ms), {})
        behind = [at for at, offset in found.items() if offset < 0]
        return found | {at: end.stable for at, end in self.ends(behind)[0].items()}

    def committed(self, partitions: Iterable[Partition]) -> dict[Partition, CommittedOffset | None]:
        """Return the group's offsets as they are now; an open transaction may be about to move them."""
        asked = [TopicPartition(partition.topic, partition.number) for partition in partitions]
        deadline = time.monotonic() + TIMEOUT_SECONDS
        answers: list[TopicPartition] = []
        while asked and not answers:
            try:
                answers = self._group.committed(asked, TIMEOUT_SECONDS)
            except KafkaException as error:
                if error.args[0].name() not in COORDINATOR_MOVES or time.monotonic() > deadline:
                    raise _trouble("the committed offsets could not be read", error) from None
                time.sleep(POLL_SECONDS)
        return {
            Partition(answer.topic, answer.partition): None
            if answer.error is not None or answer.offset == OFFSET_INVALID
            else CommittedOffset(answer.offset, answer.metadata or "")
            for answer in answers
        }

    def heads(self, positions: Mapping[Partition, int]) -> dict[Partition, Head | None]:
        """Return the first record from each position on; None where only markers and aborted records are left.

        A partition that gives no answer in time is absent.
        """
        found: dict[Partition, Head | None] = {}
        if not positions:
            return found
        self._reader.assign([TopicPartition(at.topic, at.number, offset) for at, offset in positions.items()])
        try:
            deadline = time.monotonic() + TIMEOUT_SECONDS
            failed: set[Partition] = set()
            while len(found) + len(failed) < len(positions) and time.monotonic() < deadline:
                message = self._reader.poll(POLL_SECONDS)
                if message is None:
                    continue
                at, error = Partition(str(message.topic()), int(message.partition() or 0)), message.error()
                if at in found or at in failed:
                    continue
                if error is None:
                    _, timestamp = message.timestamp()
                    found[at] = Head(int(message.offset() or 0), timestamp if timestamp > 0 else None)
                elif error.code() == _END:
                    found[at] = None
                elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):  # noqa: SLF001
                    failed.add(at)
                    continue
                else:
                    continue
                self._reader.incremental_unassign([TopicPartition(at.topic, at.number)])
        finally:
            self._reader.unassign()
        return found

    def close(self) -> None:
        self._group.close()
        self._reader.close()

    def _offsets(
        self, partitions: Iterable[Partition], spec: OffsetSpec, unknown: dict[Partition, str]
    ) -> dict[Partition, int]:
        asked = {TopicPartition(partition.topic, partition.number): spec for partition in partitions}
        if not asked:
            return {}
        answers = self._admin.list_offsets(
            asked, isolation_level=IsolationLevel.READ_COMMITTED, request_timeout=TIMEOUT_SECONDS
        )
        found = {}
        for at, future in answers.items():
            try:
                found[Partition(at.topic, at.partition)] = future.result().offset
            except KafkaException as error:
                unknown[Partition(at.topic, at.partition)] = f"the brokers do not report its end: {_text(error)}"
        return found


def _text(error: KafkaException) -> str:
    return str(error.args[0].str())


def _trouble(what: str, error: KafkaException) -> SetupError:
    return SetupError(f"kafka.bootstrap_servers: {what}: {_text(error)}")
