"""Work between batches: forget stored outputs that were sent, move positions past markers, watch brokers and topics."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from processor.engine import recovery
from processor.engine.publishing import CommittedBatch
from processor.errors import BatchAborted, Halt
from processor.kafka.connections import brokers
from processor.postgres.ledger import Advance, Sent

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from processor.engine.failing.pauses import PartitionPauses
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.engine.publishing import PublishQueue
    from processor.kafka.cluster import Cluster
    from processor.postgres.ledger import Ledger
    from processor.postgres.session import Session

# How often to check whether a position is followed by markers only.
LOOK_SECONDS = 1.0
# How often positions move past markers and aborted records: long before those expire, but seldom enough that not every
# marker behind a producer's transaction costs us a transaction of our own.
MOVE_ON_SECONDS = 60.0
# How often to ask whether the topics are still the same as those being read.
TOPICS_SECONDS = 2.0
# How often to ask a broker that could not be reached.
BROKERS_SECONDS = 2.0


class Housekeeping:
    def __init__(
        self,
        partitions: Partitions,
        publishing: PublishQueue,
        ledger: Ledger,
        session: Session,
        cluster: Cluster,
        pauses: PartitionPauses,
    ) -> None:
        self._partitions = partitions
        self._publishing = publishing
        self._ledger = ledger
        self._session = session
        self._cluster = cluster
        self._pauses = pauses
        self._unmarked: dict[OwnedPartition, int] = {}  # partitions with stored outputs, and the end of the last ones
        self._move_on_at = 0.0  # by the event loop's clock

    # --- stored outputs ---

    def stored(self, shares: Mapping[OwnedPartition, Advance]) -> None:
        """Note that outputs of these were stored with a batch."""
        self._unmarked |= {partition: share.next_offset for partition, share in shares.items() if share.outputs}

    def sent(self) -> dict[OwnedPartition, Sent]:
        """Return up to where Kafka is known to have the stored outputs."""
        return {one: Sent(one.ledger_id, one.epoch, one.published) for one in self._unmarked if one.owned}

    def forgotten(self, sent: Mapping[OwnedPartition, Sent]) -> None:
        """Note that the ledger has forgotten the outputs that were sent."""
        for partition, one in sent.items():
            if self._unmarked[partition] <= one.published:
                del self._unmarked[partition]

    def left_to_recovery(self, partitions: Iterable[OwnedPartition]) -> None:
        for partition in partitions:
            self._unmarked.pop(partition, None)

    async def mark_sent(self) -> None:
        """Delete stored outputs that Kafka has, so that an operator's rewind does not send them again."""
        await self._publishing.finish()
        self._unmarked = {partition: end for partition, end in self._unmarked.items() if partition.owned}
        sent = self.sent()
        if sent:
            async with self._session.use() as connection:
                await self._ledger.mark_sent(connection, list(sent.values()))
            self.forgotten(sent)  # only these: a recovery may have found others in the meantime

    # --- positions ---

    @property
    def may_move_on(self) -> bool:
        return asyncio.get_running_loop().time() >= self._move_on_at

    async def move_on(self) -> None:
        """Move positions past markers and aborted records that nothing follows: they may expire before a record comes.

        It changes ledger and Kafka as a batch without records does.
        """
        now = asyncio.get_running_loop().time()
        self._move_on_at = now + LOOK_SECONDS
        shares = {
            one: Advance(
                one.partition,
                one.epoch,
                one.position,
                one.assignment.empty.stop,
                None,
                one.published,
                one.crashes.records_to_mark > 0,
            )
            for one in self._partitions.active()
            if one.position in one.assignment.empty and not one.leaving
        }
        if shares:
            self._move_on_at = now + MOVE_ON_SECONDS
            async with self._session.use() as connection:
                ours = await self._ledger.advance(connection, list(shares.values()), ())
            shares = {one: share for one, share in shares.items() if share.partition in ours}
            for one, share in shares.items():
                one.position = share.next_offset
            self._publishing.add(CommittedBatch(shares, ()), more=False)

    # --- brokers and topics ---

    async def watch_brokers(self) -> None:
        """As long as we live: notice when those that could not be reached are back."""
        while True:
            await asyncio.sleep(BROKERS_SECONDS)
            if brokers.in_doubt:
                await asyncio.to_thread(brokers.ask, self._cluster.answering)

    async def watch_topics(self) -> None:
        """Halt partitions of a topic that is deleted and recreated while we read it. Runs until it is cancelled.

        Clients do not notice: librdkafka goes on in the new topic, at its position in the old one.
        """
        while True:
            await asyncio.sleep(TOPICS_SECONDS)
            known = {one: one.topic_id for one in self._partitions.owned() if one.topic_id}
            try:
                topics = await asyncio.to_thread(self._cluster.topics, {one.partition.topic for one in known})
            except BatchAborted:  # the brokers do not answer: try again next time
                continue
            for one, topic_id in known.items():
                topic = topics.get(one.partition.topic)
                if topic is not None and one.topic_id == topic_id:  # no recovery has changed it in the meantime
                    try:
                        recovery.same_topic(one.partition, topic_id, topic.id)
                    except Halt as halt:
                        self._pauses.halt(one, str(halt))
