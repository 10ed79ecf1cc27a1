"""Partitions that wait because of a failed message: for its next try, or for an operator.

A waiting partition is not read, and what was read ahead of it is forgotten: it needs no memory however long it waits,
and the other partitions go on. Then it is read again from the ledger's position.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

from processor.engine.failing import classify
from processor.engine.failing.classify import Kind
from processor.engine.partitions import Obstacle
from processor.errors import Halt, text_of
from processor.observe.events import MessageRetried, PartitionHalted, PartitionHeld

if TYPE_CHECKING:
    from processor.engine.failing.attempts import Attempts
    from processor.engine.failing.bisect import Remaining
    from processor.engine.failing.classify import Judge
    from processor.engine.failing.outcomes import Exhausted, Wait
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.messages.batch import Batch
    from processor.messages.failure import Failure
    from processor.messages.record import Record
    from processor.observe.events import Emit
    from processor.observe.readiness import Readiness
    from processor.postgres.inbox import Inbox
    from processor.postgres.session import Session
    from processor.settings.schema import Settings

# The backoff of an outage starts as if there had been this many tries: the first wait is up to 0.4 s.
OUTAGE_TRIES = 2


@dataclass(frozen=True, slots=True)
class Hold:
    seconds: float
    reason: str
    outage: bool


class PartitionPauses:
    def __init__(
        self,
        settings: Settings,
        partitions: Partitions,
        session: Session,
        inbox: Inbox,
        attempts: Attempts,
        judge: Judge,
        readiness: Readiness,
        emit: Emit,
    ) -> None:
        self._halts = settings.failure.policy == "halt"
        self._partitions = partitions
        self._session = session
        self._inbox = inbox
        self._attempts = attempts
        self._judge = judge
        self._readiness = readiness
        self._emit = emit
        self._new: dict[OwnedPartition, Hold] = {}
        self._held: dict[OwnedPartition, asyncio.TimerHandle] = {}
        self._halted: set[OwnedPartition] = set()
        self._obstructed: set[OwnedPartition] = set()  # those that wait because of an outage

    def __contains__(self, partition: OwnedPartition) -> bool:
        return partition in self._held or partition in self._halted

    def owned(self) -> list[OwnedPartition]:
        """Return the waiting partitions that are still ours."""
        return [partition for partition in (*self._held, *self._halted) if partition.owned]

    async def blame(self, remaining: Remaining, record: Record, error: Exception) -> None:
        """Let a record at fault fail, or let its partition wait before the record is tried again."""
        if record.failure is not None:
            raise Halt(f"{record.coordinates}: its failure cannot be stored either: {text_of(error)}") from error
        partition = self._partitions.of(record.reading)
        kind = self._judge.kind(error)
        reason = f"{record.handler}: {type(error).__name__}: {text_of(error)}"
        if kind is Kind.OUTAGE:
            await self._attempts.end([record])
            self._postpone(remaining, partition, record.message.offset, reason, classify.named_delay(error))
            return
        failure = self._judge.final_failure(record, error)
        if failure is None:
            delay = self._judge.delay(record, error)
            await self._note(record, partition, classify.failure_of(error, kind), delay)
            self._postpone(remaining, partition, record.message.offset, reason, delay, outage=False)
            return
        record.failure = failure
        if self._halts:
            await self.stop(remaining, record)
        else:
            remaining.found()

    async def wait(self, remaining: Remaining, part: Batch, wait: Wait) -> None:
        await self._attempts.end(part.rows)
        partitions = wait.partitions
        if partitions is None:
            partitions = [self._partitions.of(reading) for reading in part.readings().values()]
        for partition in partitions:
            self._postpone(remaining, partition, 0, wait.reason, wait.seconds, outage=wait.outage)

    async def exhausted(self, remaining: Remaining, part: Batch, exhausted: Exhausted) -> None:
        await self._attempts.end(part.rows)
        self._halt(remaining, exhausted.partition, 0, exhausted.reason)

    def halt_at_undecodable(self, remaining: Remaining, batch: Batch) -> None:
        """Halt partitions at records that cannot be decoded, if the policy is to halt at a failure."""
        if self._halts:
            for record in batch.rows:
                if record.failure is not None:
                    self._halt_at(remaining, record)

    async def stop(self, remaining: Remaining, record: Record) -> None:
        """Halt the partition of a failed record, as the policy asks."""
        await self._attempts.end([record])
        self._halt_at(remaining, record)

    def _halt_at(self, remaining: Remaining, record: Record) -> None:
        assert record.failure is not None
        reason = f"{record.coordinates}: {record.failure.detail}"
        self._halt(remaining, self._partitions.of(record.reading), record.message.offset, reason)

    def begin(self) -> None:
        """Start the waits. Called after the batch, whose later commits have moved the positions to resume from."""
        for partition, hold in self._new.items():
            self._emit(PartitionHeld(str(partition.partition), round(hold.seconds, 3), hold.reason))
            partition.obstruct(Obstacle.OUTAGE if hold.outage else Obstacle.RETRY, hold.reason)
            if hold.outage:
                self._obstructed.add(partition)
                self._readiness.obstruct(partition, hold.reason)
            self._held[partition] = asyncio.get_running_loop().call_later(hold.seconds, self._resume, partition)
        self._new.clear()

    def advanced(self, partition: OwnedPartition) -> None:
        """End a partition's outage: a batch of it has been committed, so what it needs is available again."""
        partition.clear(Obstacle.OUTAGE, Obstacle.RETRY)
        if partition.outages:
            partition.outages = 0
            self._obstructed.discard(partition)
            if partition not in self._halted:
                self._readiness.clear(partition)

    def raise_if_all_halted(self) -> None:
        """Raise Halt if no partition is left that could go on."""
        for partition in [one for one in (*self._halted, *self._obstructed) if not one.owned]:
            self._halted.discard(partition)
            self._obstructed.discard(partition)
            self._readiness.clear(partition)
        owned = self._partitions.owned()
        if owned and all(partition.halted for partition in owned):
            raise Halt("; ".join(f"{halted.partition}: {halted.halted}" for halted in owned))

    def halt(self, partition: OwnedPartition, reason: str) -> None:
        """Stop a partition until an operator has looked at it; the others go on."""
        self._new.pop(partition, None)
        if (timer := self._held.pop(partition, None)) is not None:
            timer.cancel()
        self._partitions.suspend([partition])
        if partition in self._halted:
            return
        self._halted.add(partition)
        partition.obstruct(Obstacle.HALTED, reason)
        self._readiness.obstruct(partition, reason)
        self._emit(PartitionHalted(str(partition.partition), reason))

    def close(self) -> None:
        for timer in self._held.values():
            timer.cancel()

    async def _note(self, record: Record, partition: OwnedPartition, failure: Failure, delay: float) -> None:
        """Count the attempt, in the inbox row if there is one, where it survives our death."""
        if record.in_inbox:
            async with self._session.use() as connection:
                await self._inbox.note(connection, record, failure)
        else:
            record.attempts += 1
            partition.attempts[record.message.offset] = record.attempts
        seconds = round(delay, 3)
        self._emit(MessageRetried(record.message.id, record.coordinates, record.attempts, seconds, failure.detail))

    def _postpone(
        self,
        remaining: Remaining,
        partition: OwnedPartition,
        offset: int,
        reason: str,
        seconds: float | None,
        *,
        outage: bool = True,
    ) -> None:
        """Let a partition wait, from this offset on, once the batch is done."""
        remaining.leave(partition, offset)
        if partition in self._halted:
            return
        if outage:
            partition.outages += 1
        if seconds is None:
            seconds = classify.backoff(partition.outages + OUTAGE_TRIES)
        self._partitions.suspend([partition])
        self._new[partition] = Hold(seconds, reason, outage)

    def _resume(self, partition: OwnedPartition) -> None:
        del self._held[partition]
        if partition.owned and not partition.recovering:  # otherwise recovery begins to read it
            self._partitions.begin(partition, partition.position)

    def _halt(self, remaining: Remaining, partition: OwnedPartition, offset: int, reason: str) -> None:
        remaining.leave(partition, offset)
        self.halt(partition, reason)
