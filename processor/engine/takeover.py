"""Recovers partitions that come to us or start over: brings both systems in step, sends stored outputs, begins to read.

The facts of all partitions are fetched together, but each partition is decided on its own: one without a leader is left
for another try, one where only an operator can decide is halted, and the others wait for neither. recovery.py decides,
and the five steps here carry that out; the partition is not read before they are done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from processor import failpoints
from processor.engine import recovery
from processor.engine.partitions import Obstacle
from processor.engine.portions import Piece, portions, split
from processor.engine.publishing import still_owned
from processor.errors import BatchAborted, Halt
from processor.kafka.producer import Offset
from processor.messages import positions, stored
from processor.messages.outputs import EncodedOutputs
from processor.observe.events import FrozenSessionEnded, PartitionReady, StoredOutputsSent
from processor.postgres import retention
from processor.postgres.ledger import Sent
from processor.postgres.retention import NOTHING_FORGOTTEN
from processor.postgres.session import end_frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from processor.engine.crashes import CrashTracker
    from processor.engine.failing.parking import Parking
    from processor.engine.failing.pauses import PartitionPauses
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.engine.recovery import Step
    from processor.kafka.cluster import Cluster
    from processor.kafka.producer import TransactionalProducer
    from processor.messages.message import Partition
    from processor.messages.positions import CommittedOffset, Log
    from processor.observe.events import Emit
    from processor.postgres.ledger import Ledger, LedgerRow
    from processor.postgres.retention import Watermark
    from processor.postgres.session import Connection, Session
    from processor.postgres.slots import Slot
    from processor.settings.schema import Settings

# How often a retry halves what one transaction sends. Bounded, because something else than the size may be the reason.
HALVED = 6


@dataclass(slots=True)
class Progress:
    """The state of one recovery: the known facts, the decided steps, and the partitions left for another try."""

    committed: Mapping[Partition, CommittedOffset | None]
    rows: Mapping[Partition, LedgerRow] = field(default_factory=dict)
    logs: Mapping[Partition, Log] = field(default_factory=dict)
    forgotten: Mapping[Partition, Watermark] = field(default_factory=dict)
    steps: dict[OwnedPartition, Step] = field(default_factory=dict)
    left: dict[OwnedPartition, str] = field(default_factory=dict)

    def leave(self, partition: OwnedPartition, reason: str) -> None:
        """Leave a partition for another try."""
        self.steps.pop(partition, None)
        self.left[partition] = reason

    def stored(self, partition: OwnedPartition) -> Sequence[bytes]:
        """Return the outputs that Kafka is not known to have, batch by batch."""
        row = self.rows.get(partition.partition)
        return row.unsent if row else ()


class Takeover:
    def __init__(
        self,
        settings: Settings,
        partitions: Partitions,
        cluster: Cluster,
        session: Session,
        ledger: Ledger,
        slot: Slot,
        producer: TransactionalProducer,
        pauses: PartitionPauses,
        crashes: CrashTracker,
        parking: Parking,
        key_of: Callable[[str], bytes],
        inbox_id: Callable[[Partition, int], int],
        emit: Emit,
    ) -> None:
        self._settings = settings
        self._partitions = partitions
        self._cluster = cluster
        self._session = session
        self._ledger = ledger
        self._slot = slot
        self._producer = producer
        self._pauses = pauses
        self._crashes = crashes
        self._parking = parking
        self._key_of = key_of
        self._inbox_id = inbox_id
        self._emit = emit

    async def recover(self, partitions: Sequence[OwnedPartition], tries: int) -> dict[OwnedPartition, str]:
        """Begin to read these, or halt them; return those that need another try, and why.

        The more `tries`, the less one transaction sends: it may have been too much for its time-out.
        """
        self._cluster.forget()  # an output topic that is gone may be why they start over
        # Ends the transaction that a dead producer of our slot left open: until then no committed offset is final.
        await self._producer.open()
        names = [partition.partition for partition in partitions]
        committed, unknown = await asyncio.to_thread(self._cluster.committed, names)
        progress = Progress(committed)
        progress.left = {one: unknown[one.partition] for one in partitions if one.partition in unknown}
        known = [partition for partition in partitions if partition not in progress.left]
        if known:
            with self._partitions.using(known):
                await self._prove_membership(known, progress)  # 1
                await self._raise_epochs(known, progress)  # 2
                await self._decide(known, progress)  # 3
                await self._send_stored(progress, tries)  # 4
                await self._settle(progress)  # 5
                self._begin_reading(progress)
        return progress.left

    async def _prove_membership(self, partitions: Sequence[OwnedPartition], progress: Progress) -> None:
        """Commit the same offsets again, unchanged: the broker refuses unless we are a member of the group.

        A process that was frozen while the group evicted it fails here, before it could shut out the rightful owner.
        """
        found = [(one.partition, at) for one in partitions if (at := progress.committed[one.partition]) is not None]
        offsets = [Offset(partition, at.offset, at.metadata) for partition, at in found]
        if offsets:
            await self._producer.publish((), offsets, still_owned(partitions))

    async def _raise_epochs(self, partitions: Sequence[OwnedPartition], progress: Progress) -> None:
        """Raise the epochs: from here on a predecessor cannot commit to Postgres. The group shuts it out of Kafka."""
        frozen_after = self._settings.database.idle_in_transaction_timeout_ms / 1000
        committed = {one.partition: progress.committed[one.partition] for one in partitions}
        newest = {partition: (at.epoch or 0) if at else 0 for partition, at in committed.items()}
        alive = {one.partition for one in partitions if one.recovered}
        async with self._session.use() as connection:
            for pid in await end_frozen(connection, frozen_after):
                self._emit(FrozenSessionEnded(pid))
            progress.rows = await self._ledger.raise_epochs(connection, newest, self._slot.number, alive)

    async def _decide(self, partitions: Sequence[OwnedPartition], progress: Progress) -> None:
        """Decide the step of each partition, and load what ledger and inbox know about it."""
        names = [partition.partition for partition in partitions]
        progress.logs, unknown = await asyncio.to_thread(self._cluster.logs, names)
        for partition in partitions:
            if partition.partition in unknown:
                progress.leave(partition, unknown[partition.partition])
        new_topics = {at.topic for at in progress.logs if at not in progress.rows}
        async with self._session.use() as connection:
            met = await self._ledger.met(connection, new_topics) if new_topics else {}
            progress.forgotten = await retention.watermarks(connection, self._ledger.consumer)
            for partition in partitions:
                if partition not in progress.left:
                    self._decide_one(partition, progress, met)
            for partition in list(progress.steps):
                await self._adopt(connection, partition, progress)
            if progress.steps:
                await self._parking.load(connection, list(progress.steps))

    def _decide_one(self, partition: OwnedPartition, progress: Progress, met: Mapping[str, int]) -> None:
        name = partition.partition
        try:
            progress.steps[partition] = recovery.decide(
                name,
                progress.rows.get(name),
                progress.committed[name],
                progress.logs[name],
                start=self._settings.kafka.start,
                on_database_behind=self._settings.kafka.on_database_behind,
                met=met.get(progress.logs[name].topic_id),
                forgotten=progress.forgotten.get(name, NOTHING_FORGOTTEN),
            )
        except Halt as halt:
            self._pauses.halt(partition, str(halt).removeprefix(f"{name}: "))

    async def _adopt(self, connection: Connection, partition: OwnedPartition, progress: Progress) -> None:
        """Take epoch, id and crash history from the partition's row; the first owner makes the row."""
        name, step = partition.partition, progress.steps[partition]
        row, at, log = progress.rows.get(name), progress.committed[name], progress.logs[name]
        partition.epoch = row.epoch if row else ((at and at.epoch) or 0) + 1
        ledger_id = row.partition_id if row else None
        if step.create:
            ledger_id = await self._ledger.create(connection, name, partition.epoch, self._slot.number, log, step.start)
        if ledger_id is None:
            progress.leave(partition, f"{name}: another instance has made its ledger row first")
            return
        partition.ledger_id, partition.topic_id = ledger_id, log.topic_id
        partition.partition_id = self._inbox_id(name, ledger_id)
        if row is not None and not partition.recovered:
            self._crashes.taken_over(partition, row, step.start)

    async def _send_stored(self, progress: Progress, tries: int) -> None:
        """Send stored outputs and move the committed offsets to the ledger's positions, in bounded portions.

        Each offset moves as far as the outputs sent with it: a death in between looks like one between the commits.
        """
        limit = self._settings.batch.max_bytes >> min(tries, HALVED)
        pieces = (
            piece
            for partition, step in list(progress.steps.items())
            for piece in self._pieces(partition, step, progress.stored(partition), limit)
            if partition in progress.steps
        )
        sent = 0
        for portion in portions(pieces, limit, together=tries == 0):
            sent += await self._send(portion, progress)
            failpoints.reach("after_portion")
        if sent:
            self._emit(StoredOutputsSent(sent))

    async def _settle(self, progress: Progress) -> None:
        """Delete the stored outputs, which Kafka now has, and move the ledger to offsets that an operator has set.

        Such an offset becomes ours before any work starts from it: otherwise a crash would look as if an operator had
        moved it again.
        """
        if not progress.steps:
            return
        async with self._session.use() as connection:
            sent = [
                Sent(one.ledger_id, one.epoch, step.start)
                for one, step in progress.steps.items()
                if progress.stored(one)
            ]
            if sent:
                await self._ledger.mark_sent(connection, sent)
            for partition in [one for one, step in progress.steps.items() if step.follow and not step.create]:
                await self._reposition(connection, partition, progress)
        followed = {
            one: Offset(one.partition, step.start, positions.metadata(one.epoch))
            for one, step in progress.steps.items()
            if step.follow
        }
        if followed:
            failpoints.reach("after_reposition")
            await self._producer.publish((), list(followed.values()), still_owned(followed))

    async def _reposition(self, connection: Connection, partition: OwnedPartition, progress: Progress) -> None:
        """Move the ledger, unless what lies there has been forgotten since this was decided."""
        name, start = partition.partition, progress.steps[partition].start
        position = progress.rows[name].next_offset
        async with connection.transaction(isolation="read_committed"):
            if not await retention.may_move(connection, partition.ledger_id, position, start):
                progress.leave(partition, f"{name}: messages from {start} on have just been forgotten (retention)")
            elif not await self._ledger.reposition(connection, name, partition.epoch, start):
                progress.leave(partition, f"{name}: another instance has raised the epoch")

    def _begin_reading(self, progress: Progress) -> None:
        for partition, step in progress.steps.items():
            partition.silent_below = step.silent_below
            partition.published = step.start
            partition.recovered = True
            if partition in self._pauses:
                partition.position = step.start
            else:
                partition.clear(Obstacle.OUTAGE, Obstacle.RETRY)
                self._partitions.begin(partition, step.start)
            self._emit(PartitionReady(str(partition.partition), step.event, step.start))

    # --- stored outputs ---

    async def _send(self, portion: Sequence[Piece], progress: Progress) -> int:
        """Send a portion; return how many outputs were sent. Partitions that fail need another try, or are halted.

        A failed transaction may have been committed all the same: the next try learns that from Kafka's offset. It
        sends each partition by itself, which shows the one at fault.
        """
        portion = await self._sendable(portion, progress)
        if not portion:
            return 0
        outputs = [piece.outputs for piece in portion if len(piece.outputs)]
        offsets = {piece.partition: piece.offset for piece in portion}
        try:
            await self._producer.publish(outputs, list(offsets.values()), still_owned(offsets))
        except (BatchAborted, Halt) as error:
            for partition in offsets:
                if isinstance(error, Halt) and len(offsets) == 1:
                    del progress.steps[partition]
                    self._pauses.halt(partition, str(error))
                else:
                    progress.leave(partition, str(error))
            return 0
        return sum(map(len, outputs))

    async def _sendable(self, portion: Sequence[Piece], progress: Progress) -> list[Piece]:
        """The pieces of partitions that go on; those of which an output topic does not exist come again until it does.

        Sent all the same, it would take the other partitions of its transaction with it, and for a topic that it has
        never seen librdkafka waits until the transaction's time-out, in which nobody else could publish.
        """
        portion = [piece for piece in portion if piece.partition in progress.steps]
        topics = {topic for piece in portion for topic in piece.outputs.topics}
        if not topics or self._cluster.knows(topics):
            return portion
        try:
            missing = await asyncio.to_thread(self._cluster.missing, topics)
        except BatchAborted as error:
            for piece in portion:
                progress.leave(piece.partition, str(error))
            return []
        for piece in portion:
            if gone := missing.intersection(piece.outputs.topics):
                name = piece.partition.partition
                progress.leave(
                    piece.partition, f"{name}: output topic {', '.join(sorted(gone))} does not exist; create it"
                )
        return [piece for piece in portion if piece.partition in progress.steps]

    def _pieces(self, partition: OwnedPartition, step: Step, blobs: Iterable[bytes], limit: int) -> Iterator[Piece]:
        missing = EncodedOutputs.of()
        if step.send_from is not None:
            for blob in blobs:
                kept = stored.unpack(blob, self._key_of)
                unsent = [index for index, offset in enumerate(kept.offsets) if offset >= step.send_from]
                missing.extend(kept.only(unsent))
        for outputs, below, size in split(missing, limit):
            if not step.follow:
                end = step.commit if below is None else below
                metadata = positions.metadata(partition.epoch)
            else:
                end = step.start if len(outputs) else None
                metadata = positions.metadata(partition.epoch, sent=max(outputs.offsets, default=0) + 1)
            if end is not None:
                yield Piece(partition, outputs, Offset(partition.partition, end, metadata), size)
