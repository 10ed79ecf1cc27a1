"""What recovery proves its membership with (`engine/takeover.py:_prove_membership`, step 1), when it is out of date.

Since KIP-1251 a broker takes a commit with an older member epoch, if the partition has been the member's ever since.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from typing import Any

import pytest
from confluent_kafka import Consumer

from processor.errors import Fenced
from processor.kafka.producer import Offset, TransactionalProducer
from processor.messages.message import Partition
from processor.settings.load import load
from tests.conftest import Deploy, unique
from tests.support.waiting import eventually

SECONDS = 30.0


class Group:
    """Members that hold partitions of one topic, each by its own librdkafka, with the protocol of newer brokers."""

    def __init__(self, deploy: Deploy, closing_all: ExitStack) -> None:
        deployed = deploy(protocol="consumer", partitions=2)
        self._topic = deployed.input_topic
        self._settings = load(deployed.config, {}).kafka
        self._consumer = deployed.consumer
        self._closing = closing_all

    def join(self, silent_ms: int = 300_000) -> Consumer:
        """Whoever is not polled for so long leaves it."""
        own = {"max.poll.interval.ms": silent_ms, "session.timeout.ms": None}
        settings = self._settings.consumer_config(self._consumer) | own
        given = {name: value for name, value in settings.items() if value is not None}
        consumer = self._closing.enter_context(closing(Consumer(given, logger=logging.getLogger("librdkafka"))))
        consumer.subscribe([self._topic])
        return consumer

    def until(self, polled: Sequence[Consumer], condition: Callable[[], bool], what: str) -> None:
        def holds() -> bool:
            for consumer in polled:
                consumer.poll(0.05)
            return condition()

        eventually(holds, SECONDS, what)

    def held(self, consumer: Consumer) -> list[int]:
        return sorted(partition.partition for partition in consumer.assignment())

    def proves(self, metadata: Any, partition: int) -> bool:
        """Whether the broker takes what recovery would commit."""

        async def name() -> str:
            return unique("proof")

        async def publish() -> bool:
            publisher = TransactionalProducer(self._settings, name, lambda _refused: metadata)
            try:
                await publisher.publish((), [Offset(Partition(self._topic, partition), 0, "")], lambda: True)
            except Fenced:
                return False
            finally:
                await publisher.close()
            return True

        return asyncio.run(publish())


@pytest.fixture
def group(deployment: Deploy) -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(deployment, stack)


def test_metadata_of_before_a_partition_was_another_member_s_never_proves_that_it_is_ours(group: Group) -> None:
    first = group.join()
    group.until([first], lambda: group.held(first) == [0, 1], "both partitions")
    before = first.consumer_group_metadata()
    assert group.proves(before, 0)
    assert group.proves(before, 1)

    second = group.join()
    both = [first, second]
    group.until(both, lambda: len(group.held(first)) == len(group.held(second)) == 1, "one partition each")
    (kept,), (moved,) = group.held(first), group.held(second)
    assert not group.proves(before, moved), "it is another member's"
    assert group.proves(second.consumer_group_metadata(), moved)
    group.until(both, lambda: True, "both stay members")
    still = group.proves(before, kept)

    second.close()
    group.until([first], lambda: group.held(first) == [0, 1], "it came back")
    assert not group.proves(before, moved), "somebody else may have committed meanwhile"
    assert group.proves(first.consumer_group_metadata(), moved)
    assert still, "KIP-1251: it was the member's all the time"


def test_member_that_was_evicted_proves_nothing_until_it_has_joined_again(group: Group) -> None:
    """As one that slept: it keeps its member id, and comes back under it."""
    first = group.join(silent_ms=4_000)
    group.until([first], lambda: group.held(first) == [0, 1], "both partitions")
    before = first.consumer_group_metadata()
    second = group.join()
    group.until([second], lambda: group.held(second) == [0, 1], "the first is evicted")
    assert not group.proves(before, 0)
    second.close()
    group.until([first], lambda: not group.held(first), "it hears of it")
    group.until([first], lambda: group.held(first) == [0, 1], "it is back")
    assert not group.proves(before, 0), "its old metadata is of a membership that ended"
    assert group.proves(first.consumer_group_metadata(), 0)
