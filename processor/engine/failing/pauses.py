"""Messages that failed, and partitions that wait: for the next try of one of theirs, or for an operator.

A partition that waits is paused, and what was read ahead of it is forgotten: it costs no memory however long it
takes, polling goes on, and the other partitions with it. Then it is read again from where its ledger stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from processor.engine.failing import classify
from processor.engine.failing.classify import Kind
from processor.errors import BatchAborted, ConnectionLost, Halt, text_of
from processor.messages.batch import told

if TYPE_CHECKING:
    from processor.engine.failing.bisect import Remaining
    from processor.engine.failing.classify import Judge
    from processor.engine.failing.outcomes import Exhausted, Wait
    from processor.kafka.assignment import Assignment
    from processor.kafka.reader import PartitionReader
    from processor.messages.record import Failure, Record
    from processor.observe.readiness import Readiness
    from processor.postgres.inbox import Inbox
    from processor.postgres.session import Session
    from processor.settings.schema import Settings

log = structlog.get_logger()

# An outage is first asked about after up to 0.4 s.
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
        source: PartitionReader,
        session: Session,
        inbox: Inbox,
        judge: Judge,
        readiness: Readiness,
    ) -> None:
        self._halts = settings.failure.policy == "halt"
        self._source = source
        self._session = session
        self._inbox = inbox
        self._judge = judge
        self._readiness = readiness
        self._new: dict[Assignment, Hold] = {}
        self._held: dict[Assignment, asyncio.TimerHandle] = {}
        self._halted: set[Assignment] = set()
        self._obstructed: set[Assignment] = set()  # by an outage

    def __contains__(self, assignment: Assignment) -> bool:
        return assignment in self._held or assignment in self._halted

    def owned(self) -> list[Assignment]:
        """Those that wait and are still ours."""
        return [assignment for assignment in (*self._held, *self._halted) if assignment.owned]

    async def blame(self, batch: Remaining, record: Record, error: Exception) -> bool:
        """One record could not be processed: it fails, or its partition waits; True if it is tried again."""
        if record.failure is not None:
            raise Halt(f"{record.coordinates}: not even its failure can be stored: {text_of(error)}") from error
        kind = self._judge.kind(error)
        reason = f"{record.handler}: {type(error).__name__}: {text_of(error)}"
        if kind is Kind.OUTAGE:
            await self._end([record])
            self._postpone(batch, record.assignment, record.message.offset, reason, getattr(error, "after", None))
            return False
        failure = self._judge.verdict(record, error)
        if failure is None:
            delay = self._judge.delay(record, error)
            await self._note(record, classify.failure_of(error, kind), delay)
            self._postpone(batch, record.assignment, record.message.offset, reason, delay, outage=False)
            return True
        record.failure = failure
        if self._halts:
            await self.stop(batch, record)
        else:
            batch.found()
        return False

    async def wait(self, batch: Remaining, part: Sequence[Record], wait: Wait) -> None:
        await self._end(part)
        for assignment in wait.assignments:
            self._postpone(batch, assignment, 0, str(wait), wait.seconds, outage=wait.outage)

    async def exhausted(self, batch: Remaining, part: Sequence[Record], exhausted: Exhausted) -> None:
        await self._end(part)
        self._halt(batch, exhausted.assignment, 0, str(exhausted))

    def sort_out(self, batch: Remaining, records: Sequence[Record]) -> None:
        """By policy, a partition goes no further than to a record that cannot even be decoded."""
        if self._halts:
            for record in told(records):
                if record.failure is not None:
                    self._halt_at(batch, record)

    async def stop(self, batch: Remaining, record: Record) -> None:
        """A record has failed, and the policy is to go no further."""
        await self._end([record])
        self._halt_at(batch, record)

    def _halt_at(self, batch: Remaining, record: Record) -> None:
        assert record.failure is not None
        reason = f"{record.coordinates}: {record.failure.detail}"
        self._halt(batch, record.assignment, record.message.offset, reason)

    def begin(self) -> None:
        """Let the waiting begin. Only after the batch: what it still committed has moved the position to go on from."""
        for assignment, hold in self._new.items():
            log.info(
                "partition_held",
                partition=str(assignment.partition),
                seconds=round(hold.seconds, 3),
                reason=hold.reason,
            )
            if hold.outage:
                self._obstructed.add(assignment)
                self._readiness.obstruct(assignment, hold.reason)
            timer = asyncio.get_running_loop().call_later(hold.seconds, self._resume, assignment)
            self._held[assignment] = timer
        self._new.clear()

    def advanced(self, assignment: Assignment) -> None:
        if assignment.outages:
            assignment.outages = 0
            self._obstructed.discard(assignment)
            if assignment not in self._halted:
                self._readiness.clear(assignment)

    def look(self) -> None:
        """Raises Halt if nothing is left that could go on."""
        for assignment in [a for a in (*self._halted, *self._obstructed) if not a.owned]:
            self._halted.discard(assignment)
            self._obstructed.discard(assignment)
            self._readiness.clear(assignment)
        owned = self._source.owned()
        if owned and all(assignment.halted for assignment in owned):
            raise Halt("; ".join(f"{halted.partition}: {halted.halted}" for halted in owned))

    def close(self) -> None:
        for timer in self._held.values():
            timer.cancel()

    async def _end(self, records: Sequence[Record]) -> None:
        """Attempts that count for nothing are over."""
        try:
            async with self._session.use() as connection:
                await self._inbox.abandon(connection, records, ended=True)
        except (BatchAborted, ConnectionLost) as trouble:  # at worst it is counted once too often
            log.debug("attempts_not_ended", reason=str(trouble))

    async def _note(self, record: Record, failure: Failure, delay: float) -> None:
        """Count the attempt where it survives whatever happens to us."""
        if record.in_inbox:
            async with self._session.use() as connection:
                await self._inbox.note(connection, record, failure)
        else:
            record.attempts += 1
            record.assignment.attempts[record.message.offset] = record.attempts
        log.info(
            "message_retried",
            message_id=record.message.id,
            at=record.coordinates,
            attempt=record.attempts,
            seconds=round(delay, 3),
            reason=failure.detail,
        )

    def _postpone(
        self,
        batch: Remaining,
        assignment: Assignment,
        offset: int,
        reason: str,
        seconds: float | None,
        *,
        outage: bool = True,
    ) -> None:
        """Leave a partition alone from this offset on."""
        if assignment in self._halted:
            batch.leave(assignment, offset)
            return
        if outage:
            assignment.outages += 1
        if seconds is None:
            seconds = classify.backoff(assignment.outages + OUTAGE_TRIES)
        batch.leave(assignment, offset)
        self._source.suspend([assignment])
        self._new[assignment] = Hold(seconds, reason, outage)

    def _resume(self, assignment: Assignment) -> None:
        del self._held[assignment]
        if assignment.owned:
            self._source.begin(assignment, assignment.position)

    def _halt(self, batch: Remaining, assignment: Assignment, offset: int, reason: str) -> None:
        batch.leave(assignment, offset)
        self.halt(assignment, reason)

    def halt(self, assignment: Assignment, reason: str) -> None:
        """Go no further in a partition until an operator has looked at it; the others go on."""
        self._new.pop(assignment, None)
        if (timer := self._held.pop(assignment, None)) is not None:
            timer.cancel()
        self._source.suspend([assignment])
        if assignment in self._halted:
            return
        self._halted.add(assignment)
        assignment.halted = reason
        self._readiness.obstruct(assignment, reason)
        log.error("partition_halted", partition=str(assignment.partition), reason=reason)
