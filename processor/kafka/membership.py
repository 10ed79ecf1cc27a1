"""Our membership in the group: which partitions are ours, and what proves it to the broker.

Sole user of the Consumer that is in the group. That one is never assigned anything to read, for two reasons. A
rebalance would stop all its fetchers, even those of partitions that stay. And the call that moves a partition to
another position is the same that answers a rebalance: librdkafka could take it for the answer to a rebalance that it
has not reported yet. So another client reads the records (reader.py) and knows nothing about the group.

All calls and callbacks run on one thread, which does nothing else.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog
from confluent_kafka import Consumer, KafkaException, TopicPartition

from processor.kafka import connections
from processor.kafka.final import raise_if_final
from processor.messages.message import Partition

if TYPE_CHECKING:
    from processor.kafka.reader import PartitionReader
    from processor.settings.schema import Settings

log = structlog.get_logger()

# librdkafka sends the heartbeats of an idle client only when its main thread wakes up, once a second. Each poll and
# each read of our membership wakes it.
BEAT_SECONDS = 0.05
# How long to wait for the generation after one that the broker refused as old: the broker has sent it to us already.
NEWER_SECONDS = 2.0
# With the classic protocol librdkafka joins a group at most once a second, and a new member joins twice: the second
# time for the partitions that others have given up for it. Partitions given up earlier would lie idle until then.
JOIN_INTERVAL_SECONDS = 1.0


class Membership:
    def __init__(self, settings: Settings, reader: PartitionReader) -> None:
        self._settings = settings
        self._reader = reader
        self._consumer: Consumer
        self._changed = threading.Condition()
        self._metadata: Any = None
        self._closing = threading.Event()
        self._keep_seconds = 0.0
        if settings.kafka.group_protocol == "classic":
            self._keep_seconds = max(0.0, JOIN_INTERVAL_SECONDS - settings.kafka.heartbeat_seconds)
        self._thread = threading.Thread(target=self._run, name="group", daemon=True)

    # --- for the event loop ---

    def start(self, instance: str | None = None) -> None:
        """Join the group; a process that returns in time as the same `instance` gets the same partitions."""
        config = self._settings.kafka.consumer_config(self._settings.consumer, instance)
        self._consumer = Consumer(config, logger=connections.logger)
        self._thread.start()

    def close(self) -> None:
        """Leave the group. Blocks, at most for librdkafka's own close and the revoke timeout."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    # --- for the publish thread ---

    def metadata(self, refused: Any = None) -> Any:
        """Return the metadata that proves our membership to the broker, or None while we are not a member.

        It may be slightly old: if the group has moved on, the broker refuses it, as it should. The caller then passes
        what was `refused`, and this waits for newer metadata.
        """
        with self._changed:
            if refused is not None:
                self._changed.wait_for(lambda: self._metadata != refused, NEWER_SECONDS)
            return self._metadata

    # --- the group thread ---

    def _run(self) -> None:
        try:
            self._consumer.subscribe(
                list(self._settings.topics),
                on_assign=self._on_assign,
                on_revoke=self._on_revoke,
                on_lost=self._on_lost,
            )
            while not self._closing.is_set():
                message = self._consumer.poll(BEAT_SECONDS)
                if message is not None and (error := message.error()) is not None:
                    raise_if_final(error)
                self._refresh()
        except BaseException as error:  # passed to the event loop, which decides
            self._reader.fail(error)
        finally:
            try:
                self._consumer.close()
            except (KafkaException, RuntimeError) as error:
                log.warning("consumer_close_failed", error=str(error))

    def _refresh(self) -> None:
        # The broker would accept metadata without a member id: it takes it for a client that is in no group.
        metadata = self._consumer.consumer_group_metadata() if self._consumer.memberid() else None
        if metadata != self._metadata:
            with self._changed:
                self._metadata = metadata
                self._changed.notify_all()

    def _on_assign(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.incremental_assign([])
        self._refresh()
        self._reader.assign(_partitions(partitions))
        log.info("partitions_assigned", partitions=_names(partitions))

    def _on_revoke(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Let current work finish, for a bounded time; the successor repairs what does not.

        The rebalance continues only after our answer. Until then the partitions are ours, and batches that are still
        to be published need metadata of the current generation, which this thread learns first.
        """
        self._refresh()
        revoked = self._reader.assignments(_partitions(partitions))
        self._wait(self._closing.wait, self._keep_seconds)  # ends early when we leave: then no member joins twice
        self._reader.leave(revoked)
        finished = self._wait(
            lambda seconds: self._reader.wait_until_unused(revoked, seconds),
            self._settings.kafka.revoke_timeout_ms / 1000,
        )
        self._reader.disown(revoked)
        consumer.incremental_unassign([])
        log.info("partitions_revoked", partitions=_names(partitions), finished=finished)

    def _on_lost(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """Drop the partitions at once: another member has them already."""
        lost = self._reader.assignments(_partitions(partitions))
        self._reader.leave(lost)
        self._reader.disown(lost, lost=True)
        consumer.incremental_unassign([])
        log.warning("partitions_lost", partitions=_names(partitions))

    def _wait(self, until: Callable[[float], bool], seconds: float) -> bool:
        """Wait until it is true, and keep sending heartbeats; return whether it became true in time."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if until(min(left, BEAT_SECONDS)):
                return True
            self._refresh()
        return False


def _partitions(partitions: list[TopicPartition]) -> list[Partition]:
    return [Partition(partition.topic, partition.partition) for partition in partitions]


def _names(partitions: list[TopicPartition]) -> list[str]:
    return [str(partition) for partition in _partitions(partitions)]
