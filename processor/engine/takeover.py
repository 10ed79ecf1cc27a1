"""Partitions that come to us, or start over: both systems brought in step, what is stored sent, reading begun.

All partitions are asked about together, but each is judged by itself: one that has no leader is left for another try,
one where only an operator can decide is halted, and neither keeps the others waiting. What recovery.py decides is done
here; until it is, nobody reads the partition.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import structlog

from processor import failpoints
from processor.engine import recovery
from processor.engine.publishing import still_owned
from processor.errors import BatchAborted, Halt
from processor.kafka.producer import Offset
from processor.messages import positions, stored
from processor.messages.outputs import EncodedOutputs
from processor.messages.positions import CommittedOffset
from processor.postgres import parked_keys
from processor.postgres.ledger import Sent
from processor.postgres.session import end_frozen

if TYPE_CHECKING:
    from collections.abc import Callable

    from processor.engine.failing.pauses import PartitionPauses
    from processor.engine.recovery import Step
    from processor.kafka.assignment import Assignment
    from processor.kafka.cluster import Cluster
    from processor.kafka.producer import TransactionalProducer
    from processor.kafka.reader import PartitionReader
    from processor.messages.message import Partition
    from processor.postgres.ledger import Ledger, LedgerRow
    from processor.postgres.session import Session
    from processor.postgres.slots import Slot
    from processor.settings.schema import Settings

log = structlog.get_logger()

# What an output costs besides its key and value: headers, and Kafka's own.
OUTPUT_OVERHEAD = 200
# With each try less is sent in one transaction, but not for ever: there may be other reasons why it does not go.
HALVED = 6

# Findings of recovery that are ordinary; any other one is worth an operator's look.
_EXPECTED = ("first_start", "partition_added", "in_step", "died_between_commits")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Stored outputs of one partition that go out in one transaction, and the offset that goes with them."""

    assignment: Assignment
    parcel: EncodedOutputs
    offset: Offset
    size: int


class Takeover:
    def __init__(
        self,
        settings: Settings,
        source: PartitionReader,
        cluster: Cluster,
        control: Session,
        ledger: Ledger,
        slot: Slot,
        publisher: TransactionalProducer,
        holding: PartitionPauses,
        key_of: Callable[[str], bytes],
    ) -> None:
        self._settings = settings
        self._source = source
        self._cluster = cluster
        self._control = control
        self._ledger = ledger
        self._slot = slot
        self._publisher = publisher
        self._holding = holding
        self._key_of = key_of

    async def recover(self, assignments: Sequence[Assignment], tries: int) -> dict[Assignment, str]:
        """Begin to read these, or halt them; gives those that have to come again, and why.

        After so many `tries`, less is sent in one transaction: it may have been too much for its time-out.
        """
        # End what a dead producer of our slot left open: until then nothing that Kafka says is final.
        await self._publisher.open()
        partitions = [assignment.partition for assignment in assignments]
        committed, untold = await asyncio.to_thread(self._cluster.committed, partitions)
        left = {a: untold[a.partition] for a in assignments if a.partition in untold}
        asked = [assignment for assignment in assignments if assignment not in left]
        if asked:
            with self._source.using(asked):
                left |= await self._take_over(asked, committed, tries)
        return left

    async def _take_over(
        self, assignments: Sequence[Assignment], committed: Mapping[Partition, CommittedOffset | None], tries: int
    ) -> dict[Assignment, str]:
        await self._prove_membership(assignments, committed)
        rows = await self._raise_epochs(assignments, committed)
        partitions = [assignment.partition for assignment in assignments]
        logs, untold = await asyncio.to_thread(self._cluster.logs, partitions)
        left = {a: untold[a.partition] for a in assignments if a.partition in untold}
        met: dict[str, int] = {}
        if unknown := {at.topic for at in logs if at not in rows}:
            async with self._control.use() as connection:
                met = await self._ledger.met(connection, unknown)
        steps: dict[Assignment, Step] = {}
        for assignment in assignments:
            if assignment in left:
                continue
            try:
                steps[assignment] = recovery.decide(
                    assignment.partition,
                    rows.get(assignment.partition),
                    committed[assignment.partition],
                    logs[assignment.partition],
                    start=self._settings.kafka.start,
                    on_database_behind=self._settings.kafka.on_database_behind,
                    met=met.get(logs[assignment.partition].topic_id),
                )
            except Halt as halt:
                self._holding.halt(assignment, str(halt).removeprefix(f"{assignment.partition}: "))
        if not steps:
            return left
        async with self._control.use() as connection:
            for assignment, step in list(steps.items()):
                partition = assignment.partition
                row = rows.get(partition)
                at = committed[partition]
                assignment.epoch = row.epoch if row else ((at and at.epoch) or 0) + 1
                source = row.source if row else None
                if step.create:
                    source = await self._ledger.create(
                        connection, partition, assignment.epoch, self._slot.number, logs[partition], step.start
                    )
                if source is None:
                    left[assignment] = f"{partition}: another instance was faster"
                    del steps[assignment]
                    continue
                assignment.source, assignment.topic_id = source, logs[partition].topic_id
                if row is not None and not assignment.known:
                    # An owner before us died of its first batch: one of the next records may be why.
                    assignment.caution = self._settings.batch.max_messages if row.starts else 0
                    if row.suspect is not None and row.suspect.stop > step.start:
                        assignment.suspect, assignment.deaths = row.suspect, row.deaths
            await parked_keys.load(connection, list(steps))
        stored = {a: rows[a.partition].unsent for a in steps if a.partition in rows}
        left |= await self._send_stored(steps, stored, tries)
        left |= await self._settle(steps, stored)
        for assignment, step in steps.items():
            assignment.silent_below = step.silent_below
            assignment.published = step.start
            assignment.known = True
            if assignment in self._holding:
                assignment.position = step.start
            else:
                self._source.begin(assignment, step.start)
            say = log.info if step.event in _EXPECTED else log.warning
            say("partition_ready", partition=str(assignment.partition), found=step.event, start=step.start)
        return left

    async def _prove_membership(
        self, assignments: Sequence[Assignment], committed: Mapping[Partition, CommittedOffset | None]
    ) -> None:
        """Commit the same offsets once more, unchanged: the broker refuses it unless the group counts us in.

        A process that slept through its own eviction ends here, before it could shut out the rightful owner.
        """
        known = [Offset(partition, at.offset, at.metadata) for partition, at in committed.items() if at is not None]
        if known:
            await self._publisher.publish((), known, still_owned(assignments))

    async def _raise_epochs(
        self, assignments: Sequence[Assignment], committed: Mapping[Partition, CommittedOffset | None]
    ) -> dict[Partition, LedgerRow]:
        """From here on a predecessor can commit nothing to Postgres, as it could nothing to Kafka since we came."""
        async with self._control.use() as connection:
            for pid in await end_frozen(connection, self._settings.database.idle_in_transaction_timeout_ms / 1000):
                log.warning("frozen_session_ended", backend=pid)
            newest = {partition: (at.epoch or 0) if at else 0 for partition, at in committed.items()}
            alive = {assignment.partition for assignment in assignments if assignment.known}
            return await self._ledger.raise_epochs(connection, newest, self._slot.number, alive)

    async def _settle(
        self, steps: dict[Assignment, Step], stored: Mapping[Assignment, Sequence[bytes]]
    ) -> dict[Assignment, str]:
        """Let the ledger follow: Kafka has what was stored, and an operator may have moved the offset.

        That one becomes ours before anything is done from there: a crash must not look as if it had been moved again.
        """
        left: dict[Assignment, str] = {}
        async with self._control.use() as connection:
            sent = [Sent(a.source, a.epoch, step.start) for a, step in steps.items() if stored.get(a)]
            if sent:
                await self._ledger.mark_sent(connection, sent)
            for assignment in [a for a, step in steps.items() if step.follow and not step.create]:
                partition, start = assignment.partition, steps[assignment].start
                if not await self._ledger.reposition(connection, partition, assignment.epoch, start):
                    left[assignment] = f"{partition}: another instance has raised the epoch"
                    del steps[assignment]
        followed = {
            a: Offset(a.partition, step.start, positions.metadata(a.epoch)) for a, step in steps.items() if step.follow
        }
        if followed:
            failpoints.reach("after_reposition")
            await self._publisher.publish((), list(followed.values()), still_owned(followed))
        return left

    # --- what the ledger kept for Kafka ---

    async def _send_stored(
        self, steps: dict[Assignment, Step], stored: Mapping[Assignment, Sequence[bytes]], tries: int
    ) -> dict[Assignment, str]:
        """Send it, and move the committed offsets to where the ledger stands, in portions that do not take for ever.

        An offset goes as far as what is sent with it: dying in between looks like dying between the commits. Partitions
        for which it does not go are taken from `steps`, and given with the reason unless they are halted.
        """
        limit = self._settings.batch.max_bytes >> min(tries, HALVED)
        left: dict[Assignment, str] = {}
        pieces = (
            piece
            for assignment, step in list(steps.items())
            for piece in self._pieces(assignment, step, stored.get(assignment, ()), limit)
            if assignment in steps
        )
        sent = 0
        for portion in _portions(pieces, limit, together=tries == 0):
            sent += await self._send(portion, steps, left)
            failpoints.reach("after_portion")
        if sent:
            log.info("stored_outputs_sent", outputs=sent)
        return left

    async def _send(self, portion: Sequence[Piece], steps: dict[Assignment, Step], left: dict[Assignment, str]) -> int:
        """Gives how many outputs were sent.

        What went wrong may have been committed all the same: only Kafka's offset tells, with the next try. Each
        partition is then sent by itself, so that it is known whose fault it is.
        """
        portion = [piece for piece in portion if piece.assignment in steps]
        if not portion:
            return 0
        parcels = [piece.parcel for piece in portion if len(piece.parcel)]
        offsets = {piece.assignment: piece.offset for piece in portion}
        try:
            await self._publisher.publish(parcels, list(offsets.values()), still_owned(offsets))
        except (BatchAborted, Halt) as error:
            for assignment in offsets:
                del steps[assignment]
                if isinstance(error, Halt) and len(offsets) == 1:
                    self._holding.halt(assignment, str(error))
                else:
                    left[assignment] = str(error)
            return 0
        return sum(map(len, parcels))

    def _pieces(self, assignment: Assignment, step: Step, blobs: Iterable[bytes], limit: int) -> Iterator[Piece]:
        partition = assignment.partition
        missing = EncodedOutputs.of()
        if step.send_from is not None:
            for blob in blobs:
                kept = stored.unpack(blob, self._key_of)
                missing.extend(kept.only([at for at, offset in enumerate(kept.offsets) if offset >= step.send_from]))
        for parcel, below, size in split(missing, limit):
            if not step.follow:
                end = step.commit if below is None else below
                metadata = positions.metadata(assignment.epoch)
            else:
                end = step.start if len(parcel) else None
                metadata = positions.metadata(assignment.epoch, sent=max(parcel.offsets, default=0) + 1)
            if end is not None:
                yield Piece(assignment, parcel, Offset(partition, end, metadata), size)


def split(parcel: EncodedOutputs, limit: int) -> Iterator[tuple[EncodedOutputs, int | None, int]]:
    """Cut it, in its order, into parts of up to about so many bytes: the part, the offset it goes up to, its size.

    Cut only where all outputs before are of earlier records than all behind, so that an offset can say which are sent;
    what one record has caused stays together. The last part, or the only one, goes up to the end.
    """
    texts = zip(parcel.keys, parcel.values, strict=True)
    sizes = [len(key or b"") + len(value or b"") + OUTPUT_OVERHEAD for key, value in texts]
    up_to = list(accumulate(parcel.offsets, max))
    later = list(accumulate(reversed(parcel.offsets), min))[::-1]
    start = size = 0
    cut = None  # the last place where it can be cut, and how much is before it
    for at, more in enumerate(sizes):
        if at > start and up_to[at - 1] < later[at]:
            cut = at, size
        if size + more > limit and cut is not None:
            end, before = cut
            yield parcel.part(start, end), up_to[end - 1] + 1, before
            start, size, cut = end, size - before, None
        size += more
    yield parcel.part(start, len(parcel)), None, size


def _portions(pieces: Iterable[Piece], limit: int, *, together: bool) -> Iterator[list[Piece]]:
    portion: list[Piece] = []
    size = 0
    for piece in pieces:
        alone = not together and portion and portion[-1].assignment is not piece.assignment
        if portion and (alone or size + piece.size > limit):
            yield portion
            portion, size = [], 0
        portion.append(piece)
        size += piece.size
    if portion:
        yield portion
