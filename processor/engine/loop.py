"""The life of a batch: take, claim, handle, commit to Postgres, publish to Kafka.

`_commit` is the protocol: the order of its steps is the guarantee. The outcome of an attempt is returned, and matched
in `_process`. Trouble with the servers or with our ownership is raised, and ends in `_start_over`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from processor.engine.failing import classify
from processor.engine.failing.attribute import attribute
from processor.engine.failing.bisect import Remaining, let_go
from processor.engine.failing.conclude import Ends
from processor.engine.failing.outcomes import (
    Again,
    Committed,
    Culprit,
    Cut,
    Exhausted,
    Outcome,
    Stop,
    Unattributed,
    Wait,
)
from processor.engine.publishing import CommittedBatch
from processor.engine.recoveries import Trouble
from processor.errors import BatchAborted, Fenced, Halt
from processor.handling.errors import HandlerError
from processor.handling.result import BatchResult
from processor.handling.run import BatchRun
from processor.observe.events import (
    AttemptsNotAbandoned,
    BatchCommitted,
    BatchRetried,
    LeftToRecovery,
    MessageCollided,
    MessageFailed,
    MessageParked,
    ProducerNotReady,
)
from processor.postgres import sqlstates
from processor.postgres.claims import Claims, PriorDelivery
from processor.postgres.ledger import Advance

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition
    from processor.engine.parts import Parts
    from processor.engine.transaction import Transaction
    from processor.messages.batch import Batch

ABANDON_SECONDS = 2.0
# After a queued write was refused, this many batches send the statement so that a refused write shows its message.
CAREFUL_BATCHES = 64


class Loop:
    def __init__(self, parts: Parts) -> None:
        self._settings = parts.settings
        self._job = parts.job
        self._parts = parts
        self._emit = parts.emit
        self._reader = parts.reader
        self._partitions = parts.partitions
        self._transactions = parts.transactions
        self._intake = parts.intake
        self._conclusion = parts.conclusion
        self._pauses = parts.pauses
        self._attempts = parts.attempts
        self._crashes = parts.crashes
        self._publishing = parts.publishing
        self._recoveries = parts.recoveries
        self._housekeeping = parts.housekeeping
        self._careful: dict[str, int] = {}  # statements with a refused write, and for how many more batches
        self._stopping = False

    def stop(self) -> None:
        """Finish the current batch, then leave."""
        self._stopping = True
        self._job.stop()
        self._recoveries.stop()
        self._intake.stop()

    async def open(self) -> None:
        """Make a producer while the group is being joined. If that fails, recovery tries again."""
        try:
            await self._parts.producer.open()
        except Trouble as trouble:
            self._emit(ProducerNotReady(str(trouble)))

    async def run(self) -> None:
        """Process batches until `stop` is called, or the job is done; raise Halt where an operator has to decide."""
        helpers = [asyncio.create_task(helper) for helper in self._parts.helpers()]
        for helper in helpers:
            helper.add_done_callback(self._helper_ended)
        try:
            while not (self._stopping or (self._job.bounded and self._partitions.at_their_ends())):
                used: Sequence[OwnedPartition] = ()
                try:
                    batch = await self._next_batch()
                    if batch is not None:
                        used = self._owned(batch)
                        await self._process(batch, used)
                except Trouble as error:
                    await self._start_over(error, used)
            await self._transactions.rest()
            await self._finish()
        except Halt:
            await self._transactions.rest()
            with suppress(*Trouble):  # otherwise the next start does it
                await self._publishing.finish()
            raise
        finally:
            self._pauses.close()
            for helper in helpers:
                helper.cancel()
            await asyncio.wait([*self._recoveries.cancel(), *helpers])
            if not self._job.bounded:  # the notes are the live service's
                await self._parts.troubles.leave()
            self._publishing.close()

    def _helper_ended(self, helper: asyncio.Task[None]) -> None:
        if not helper.cancelled() and (error := helper.exception()) is not None:
            self._reader.fail(error)

    async def _next_batch(self) -> Batch | None:
        """Steps 1 and 2: take records from the poll thread. Return None when there are none."""
        if self._job.waits or not self._reader.has_a_batch:
            await self._transactions.rest()
        await self._job.turn()
        await self._intake.gather()
        await self._look_up()
        batch = self._intake.take()
        if batch is None and await self._intake.idle():
            await self._housekeeping.mark_sent()
        return batch

    async def _look_up(self) -> None:
        """Handle what came in besides records: failures, new partitions, recoveries and pauses that ended."""
        self._reader.raise_failure()
        self._publishing.raise_failure()
        self._recoveries.begin_new()
        if astray := self._partitions.take_astray():
            await self._start_over(BatchAborted("; ".join(astray.values())), list(astray))
        self._pauses.raise_if_all_halted()
        self._intake.look_for_the_group()
        if self._housekeeping.may_move_on:
            await self._housekeeping.move_on()

    # --- steps 3 to 9 ---

    async def _process(self, batch: Batch, used: Sequence[OwnedPartition]) -> None:
        """Commit the batch as a whole if that succeeds, in parts if it does not.

        Every record ends with an outcome, or its partition waits and reads it again.
        """
        try:
            self._job.select(batch)
            if self._parts.routes.act:
                for record in batch.as_rows():
                    record.alone = record.acts
            self._crashes.prepare(batch, used)
            cautious = any(owned.crashes.records_to_mark for owned in used)
            remaining = Remaining(batch, 1 if cautious else self._settings.concurrency)
            if not self._job.bounded:  # what a replay comes by may have been given up since: the claim knows
                self._pauses.halt_at_undecodable(remaining, batch)
            await self._crashes.begin(used)
            while part := remaining.part():
                match await self._attempt(remaining, part, used):
                    case Committed():
                        remaining.committed()
                    case Cut(index):
                        remaining.cut(index)
                    case Culprit(index, error):
                        await self._pauses.blame(remaining, part.as_rows()[index], error)
                    case Unattributed(error):
                        if (alone := remaining.narrow()) is not None:
                            await self._pauses.blame(remaining, alone, error)
                    case Wait() as wait:
                        await self._pauses.wait(remaining, part, wait)
                    case Exhausted() as exhausted:
                        await self._pauses.exhausted(remaining, part, exhausted)
                    case Stop(record):
                        await self._pauses.stop(remaining, record)
                    case Again(reason, careful_with):
                        if careful_with is not None:
                            self._careful[careful_with] = CAREFUL_BATCHES
                        remaining.tries += 1
                        self._emit(BatchRetried(reason, remaining.tries, len(part)))
                        await asyncio.sleep(classify.backoff(remaining.tries))
        except BaseException:
            await self._abandon(batch, used)
            raise
        finally:
            self._attempts.forget()
            self._partitions.release(used)
            self._pauses.begin()

    async def _attempt(self, remaining: Remaining, part: Batch, used: Sequence[OwnedPartition]) -> Outcome:
        """Try to commit this part. Raises Trouble where recovery has to look up whether it was committed."""
        try:
            return await self._unless_lost(self._try(part), used)
        except Exception as error:
            return self._outcome_of(error, remaining)

    def _outcome_of(self, error: Exception, remaining: Remaining) -> Outcome:
        """What an error means for the batch; raises what is no matter of the batch."""
        cause = error.error if isinstance(error, HandlerError) else error
        if sqlstates.is_deadlock(cause):
            self._transactions.gate.deadlocked()
        let_go(error)
        outcome = attribute(error, tries=remaining.tries, careful=self._careful.keys(), judge=self._parts.judge)
        if not isinstance(outcome, Exception):
            return outcome
        try:
            raise outcome
        finally:
            del error, cause, outcome  # the error's traceback has this frame: the cycle would keep the batch in memory

    async def _try(self, part: Batch) -> Outcome:
        if part.rows and part.rows[0].alone:
            await self._transactions.rest()
            culprit = await self._attempts.begin(part)
            if culprit is not None:
                return culprit
        return await self._commit(part)

    async def _commit(self, batch: Batch) -> Outcome:
        """Postgres commits before Kafka, never after.

        A crash between the two leaves stored outputs and an offset that has not moved, which recovery repairs.
        Reversed, the offset would pass work that Postgres then forgets.
        """
        async with self._transactions.open(batch) as transaction:  # rolls back unless it is committed
            claims = await transaction.claim()  # 3
            if not isinstance(claims, Claims):
                return claims
            result = await self._handle(transaction, batch, claims)  # 4
            ends = await self._conclusion.conclude(batch, claims, result)  # 5
            if not isinstance(ends, Ends):
                return ends
            await transaction.keep(ends.undone, result.results)
            await self._publishing.room()  # 6
            shares, sent = self._shares(batch, result), self._housekeeping.sent()
            await transaction.advance(list(shares.values()), list(sent.values()))  # 7: Fenced if another owns one
            await transaction.count(list(shares), claims, ends, result)
            round_trips = await transaction.commit(more=self._reader.has_a_batch)  # 8
        self._housekeeping.forgotten(sent)
        self._advanced(batch, shares, result, ends)
        more = self._reader.has_a_batch and not any(owned.leaving for owned in shares)
        self._publishing.add(CommittedBatch(shares, list(result.outgoing.values())), more=more)  # 9
        self._report(batch, claims, ends, result, round_trips)
        return Committed()

    async def _handle(self, transaction: Transaction, batch: Batch, claims: Claims) -> BatchResult:
        if not claims.mine:
            return BatchResult()
        silent_below = {owned.partition: owned.silent_below for owned in self._owned(batch)}
        run = BatchRun(
            self._settings,
            transaction.session,
            self._parts.routes,
            self._parts.judge.final_failure,
            batch,
            claims,
            effect_of=self._attempts.effect_of,
            silent_below=silent_below,
            careful=self._careful.keys(),
            marker=self._crashes.marker(batch),
            stalls=self._parts.stalls,
        )
        async with transaction.handling():
            return await run.run()

    def _shares(self, batch: Batch, result: BatchResult) -> dict[OwnedPartition, Advance]:
        """Return for each partition how far the batch advances it, and the outputs to store with that."""
        ends = batch.ends()
        return {
            owned: Advance(
                owned.partition,
                owned.epoch,
                owned.position,
                ends[owned.partition],
                result.packed(owned.partition),
                owned.published,
                owned.crashes.records_to_mark > 1,
            )
            for owned in self._owned(batch)
        }

    def _advanced(self, batch: Batch, shares: dict[OwnedPartition, Advance], result: BatchResult, ends: Ends) -> None:
        """Update what we know about the partitions, now that the batch is committed."""
        sizes = batch.sizes()
        for owned, share in shares.items():
            owned.position = share.next_offset
            for offset in [offset for offset in owned.attempts if offset < share.next_offset]:
                del owned.attempts[offset]
            self._crashes.committed(owned, share.next_offset, sizes[owned.partition])
            self._pauses.advanced(owned)
        self._conclusion.count(batch, ends)
        self._parts.parking.remember(ends.undone)
        self._housekeeping.stored(shares)
        self._careful = {what: left - 1 for what, left in self._careful.items() if left > 1}
        self._careful |= dict.fromkeys(result.refused, CAREFUL_BATCHES)

    def _report(
        self, batch: Batch, claims: Claims, ends: Ends, result: BatchResult, round_trips: dict[str, int]
    ) -> None:
        repeated = sum(claims.skipped.get(prior, 0) for prior in (PriorDelivery.DUPLICATE, PriorDelivery.REDELIVERY))
        self._emit(
            BatchCommitted(
                len(batch),
                len(claims.mine) - len(ends.failed) - len(ends.parked),
                repeated,
                len(ends.failed),
                len(ends.parked),
                len(claims.collisions),
                sum(map(len, result.outgoing.values())),
                round_trips,
            )
        )
        for record in ends.failed:
            assert record.failure is not None
            self._emit(
                MessageFailed(record.message.id, record.coordinates, record.failure.reason, record.failure.detail)
            )
        for record in ends.parked:
            self._emit(MessageParked(record.message.id, record.coordinates))
        for record in claims.collisions:
            self._emit(MessageCollided(record.message.id, record.coordinates))

    def _owned(self, batch: Batch) -> list[OwnedPartition]:
        return [self._partitions.of(reading) for reading in batch.readings().values()]

    async def _unless_lost(self, work: Coroutine[Any, Any, Outcome], used: Sequence[OwnedPartition]) -> Outcome:
        """Cancel the work at once when one of its partitions is lost."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._reader.lost.clear()
                if not all(owned.owned for owned in used):
                    raise Fenced("a partition was lost while its records were being processed")
                lost = asyncio.ensure_future(self._reader.lost.wait())
                try:
                    await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    lost.cancel()
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()  # retrieved and ignored: recovery reads the facts from both systems

    # --- the way back from trouble, and out ---

    async def _start_over(self, trouble: Exception, used: Sequence[OwnedPartition]) -> None:
        """Recover the partitions that are in trouble; the others go on."""
        affected = set(used)
        await self._transactions.rest()
        self._intake.look_for_the_group()  # without brokers, the publication under way takes long to give up
        try:
            await self._publishing.finish()
        except Trouble:
            affected |= await self._publishing.abandon()
        self._housekeeping.left_to_recovery(self._recoveries.start_over(trouble, affected))

    async def _abandon(self, batch: Batch | None, used: Sequence[OwnedPartition]) -> None:
        """Take back what was begun: the batch was cancelled while we live, and must not look as if it killed us."""
        try:
            async with asyncio.timeout(ABANDON_SECONDS):
                if batch is not None:
                    await self._attempts.abandon(batch.rows)
                await self._crashes.abandon(used)
        except Exception as error:  # at worst one attempt too many is counted
            self._emit(AttemptsNotAbandoned(str(error)))

    async def _finish(self) -> None:
        """Leave nothing open and nothing to repair."""
        await self._abandon(None, self._partitions.owned())
        try:
            await self._housekeeping.mark_sent()
            await self._housekeeping.move_on()
            await self._publishing.finish()
        except Trouble as trouble:
            self._emit(LeftToRecovery(str(trouble)))
