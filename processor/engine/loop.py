"""The loop: take -> claim -> handle -> commit Postgres -> publish, and one way back from trouble.

`_commit` is the protocol: the order of its calls is the guarantee. Whatever goes wrong in it, or
in the publication that runs beside the next batch, ends in `_start_over`: read from Postgres and
Kafka what was committed, bring the two in step (recovery.py), go on from there. Nothing is
concluded from how an attempt looked from here.
"""

from __future__ import annotations

import asyncio
import os
import socket
import uuid
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import chain
from typing import TYPE_CHECKING, Any, NoReturn

import structlog

from processor import failpoints
from processor.engine import recovery
from processor.engine.claim_ahead import ClaimAhead
from processor.engine.failing import classify
from processor.engine.failing.attempts import Attempts
from processor.engine.failing.bisect import Remaining, let_go
from processor.engine.failing.budget import Budget
from processor.engine.failing.classify import Judge, Kind
from processor.engine.failing.outcomes import Exhausted, Stop, Unattributed, Wait
from processor.engine.failing.pauses import PartitionPauses
from processor.engine.orphans import Orphans
from processor.engine.publishing import CommittedBatch, PublishQueue
from processor.engine.takeover import Takeover
from processor.errors import BatchAborted, ConnectionLost, Fenced, Halt, ProcessorError, text_of
from processor.handling.queue import QueuedWriteFailed
from processor.handling.run import BatchResult, BatchRun, max_output
from processor.kafka.assignment import Assignment
from processor.kafka.producer import TransactionalProducer
from processor.messages import identity, letters
from processor.messages.batch import assignments_of, ends_of, sizes_of, told
from processor.messages.outcomes import Again, Culprit, Cut, HandlerError
from processor.messages.outputs import EncodedOutputs
from processor.messages.record import Record
from processor.postgres import parked_keys, sqlstates
from processor.postgres.deadlocks import DeadlockGate
from processor.postgres.inbox import BusyElsewhere, Claims, Inbox, PriorDelivery
from processor.postgres.ledger import Advance, Ledger, Sent
from processor.postgres.session import Connection, Session
from processor.postgres.slots import Slot

if TYPE_CHECKING:
    from processor.kafka.cluster import Cluster
    from processor.kafka.membership import Membership
    from processor.kafka.reader import PartitionReader
    from processor.observe.readiness import Readiness
    from processor.observe.stalls import Stalls
    from processor.settings.schema import Settings

log = structlog.get_logger()

IDLE_SECONDS = 1.0
# How often positions are moved past what is nobody's to process: long before it can expire, and so seldom that the
# marker behind each of a producer's transactions does not cost us another one.
MOVE_ON_SECONDS = 60.0
# How often to ask whether the topics are still the ones that are read.
TOPICS_SECONDS = 2.0

# These mean: what was committed has to be looked up. Everything else is a failing message, or a bug.
Trouble = (BatchAborted, Fenced, ConnectionLost)

SHORTEST_WAIT_SECONDS = 0.2
ABANDON_SECONDS = 2.0
# After a queued write was refused, so many batches are sent in a way that tells whose it is if it happens again.
CAREFUL_BATCHES = 64
# So often a batch is run again in place when nobody is to blame; after that somebody is looked for.
TRIES_IN_PLACE = 3


@dataclass(slots=True)
class Counts:
    records: int = 0
    completed: int = 0
    duplicates: int = 0
    failed: int = 0
    parked: int = 0
    retried: int = 0
    collisions: int = 0
    outputs: int = 0
    batches: int = 0


class Loop:
    def __init__(
        self,
        settings: Settings,
        source: PartitionReader,
        membership: Membership,
        cluster: Cluster,
        readiness: Readiness,
        stalls: Stalls,
        *,
        acts: bool,
    ) -> None:
        self._settings = settings
        self._consumer = settings.consumer
        self._source = source
        self._cluster = cluster
        self._control = Session(settings, "control", retried=True)
        owner = f"{socket.gethostname()}:{os.getpid()}"
        # A lease outlives its owner: it must not be taken for that of another one with the same process id.
        lease_owner = f"{owner}:{uuid.uuid4().hex[:8]}"
        key_of = identity.inbox_key(settings.consumer)
        self._turns = DeadlockGate(settings, self._control)
        self._inbox = Inbox(key_of, settings.message.on_collision, lease_owner, settings.effects.lease_ms, self._turns)
        self._ledger = Ledger(settings.consumer, owner)
        self._slots = Session(settings, "slot", retried=True)
        self._slot = Slot(settings.consumer, self._slots, self._ledger)
        self._orphans = Orphans(settings.kafka, self._slots, self._slot, self._ledger)
        self._judge = Judge(settings)
        self._attempts = Attempts(settings, source, self._control, self._inbox, stalls)
        self._holding = PartitionPauses(settings, source, self._control, self._inbox, self._judge, readiness)
        self._readiness = readiness
        self._stalls = stalls
        self.counts = Counts()
        self._acts = acts  # there are handlers that act outside
        self._publisher = TransactionalProducer(settings.kafka, self._slot.lease, membership.metadata)
        self._parks = settings.failure.policy == "park-key"
        self._version = version("kafka-postgres-processor")
        self._max_output = max_output(settings)
        self._ahead = ClaimAhead(settings, source, self._inbox, self._turns)
        self._last_took = 0.0  # seconds
        self._publications = PublishQueue(settings.batch, source, self._publisher, source.news.set)
        source.when_leaving = self._publications.hurry
        self._takeover = Takeover(
            settings,
            source,
            cluster,
            self._control,
            self._ledger,
            self._slot,
            self._publisher,
            self._holding,
            key_of,
        )
        self._recoveries: dict[asyncio.Task[None], list[Assignment]] = {}  # and what they are not yet done with
        self._unmarked: dict[Assignment, int] = {}  # of which outputs are stored, and up to where
        self._careful: dict[str, int] = {}  # statements of which writes were refused, and for how many batches more
        self._move_on_at = 0.0  # of the event loop's clock
        self._stopping = False
        self._backlog = False

    def stop(self) -> None:
        """Finish the batch at hand, then leave."""
        self._stopping = True
        self._source.news.set()

    async def lease(self) -> str:
        """A name that nobody else who lives has."""
        return await self._slot.lease()

    async def open(self) -> None:
        """Have a producer, while the group is being joined; if that does not go, recovery comes again."""
        try:
            await self._publisher.open()
        except Trouble as trouble:
            log.warning("producer_not_ready", reason=str(trouble))

    async def run(self) -> None:
        """Until told to stop; raises Halt where an operator has to decide."""
        helpers = [asyncio.create_task(self._orphans.watch()), asyncio.create_task(self._watch_topics())]
        if self._acts:
            helpers.append(asyncio.create_task(self._attempts.reap()))
        for helper in helpers:
            helper.add_done_callback(self._helper_ended)
        try:
            while not self._stopping:
                used: Sequence[Assignment] = ()
                try:
                    records = await self._next_batch()
                    if records:
                        used = assignments_of(records)
                        await self._process(records, used)
                except Trouble as error:
                    await self._start_over(error, used)
            await self._finish()
        except Halt:
            with suppress(*Trouble):  # else the next start does it
                await self._publications.finish()
            raise
        finally:
            self._holding.close()
            beside = [*self._recoveries, *helpers]
            for task in beside:
                task.cancel()
            await asyncio.wait(beside)
            self._publications.close()
            await self._ahead.close()

    async def _watch_topics(self) -> None:
        """Halt what is read of a topic that is deleted and created anew meanwhile.

        Clients do not tell: librdkafka goes on in the new topic, at its position in the old one.
        """
        while True:
            await asyncio.sleep(TOPICS_SECONDS)
            known = {a: a.topic_id for a in self._source.owned() if a.topic_id}
            try:
                topics = await asyncio.to_thread(self._cluster.topics, {a.partition.topic for a in known})
            except BatchAborted:  # nobody can be asked; next time, then
                continue
            for assignment, topic_id in known.items():
                topic = topics.get(assignment.partition.topic)
                if topic is not None and assignment.topic_id == topic_id:  # not recovered in the meantime
                    try:
                        recovery.same_topic(assignment.partition, topic_id, topic.id)
                    except Halt as halt:
                        self._holding.halt(assignment, str(halt))

    def _helper_ended(self, helper: asyncio.Task[None]) -> None:
        if not helper.cancelled() and (error := helper.exception()) is not None:
            self._source.fail(error)

    async def close(self) -> None:
        """Behind everything else: until we have left the group, what is under way may still be published."""
        await self._publisher.close()
        await self._slots.close()
        await self._control.close()

    # --- one batch ---

    async def _next_batch(self) -> Sequence[Record]:
        """Wait for records. Empty when it is time to look up.

        A batch that is not full waits while Kafka is at the one before, and so all that comes in meanwhile is in it.
        Under a backlog it lingers for company.
        """
        if not (self._publications.idle or self._has_more()):
            self._publications.hurry()
            await self._gather(lambda: self._publications.idle, None)
        if self._backlog and self._source.buffered and not self._ahead.has_next:
            await self._gather(lambda: False, self._settings.batch.linger_ms / 1000)
        self._source.news.clear()
        self._source.raise_failure()
        self._publications.raise_failure()
        self._recover_new()
        if astray := self._source.take_astray():
            await self._start_over(BatchAborted("; ".join(astray.values())), list(astray))
        self._holding.look()
        self._look_for_the_group()
        if asyncio.get_running_loop().time() >= self._move_on_at:
            await self._move_on()
        records = await self._ahead.take() or self._source.take()
        if records:
            self._backlog = len(records) >= self._settings.batch.max_messages // 2
            return records
        self._backlog = False
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                await self._source.news.wait()
        except TimeoutError:
            await self._mark_sent()
        return ()

    def _has_more(self) -> bool:
        """Whether the next batch is at hand, and full."""
        return self._ahead.has_next or self._source.has_a_batch

    async def _gather(self, enough: Callable[[], bool], seconds: float | None) -> None:
        """Let records come in until there is a full batch of them, or it is `enough`, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while not (self._stopping or enough() or self._source.has_a_batch):
                    self._source.news.clear()
                    await self._source.news.wait()
                    self._look_for_the_group()
        except TimeoutError:
            pass

    def _look_for_the_group(self) -> None:
        if self._source.outside:
            self._readiness.obstruct("outside", "the group has dropped us; are the brokers reachable?")
        else:
            self._readiness.clear("outside")

    async def _process(self, records: Sequence[Record], used: Sequence[Assignment]) -> None:
        """Commit the batch whole if it goes, in parts if it does not.

        Every record ends with an outcome, or its partition waits and reads it again.
        """
        self._prepare(records, used)
        cautious = any(assignment.caution for assignment in used)
        batch = Remaining(records, 1 if cautious else self._settings.concurrency)
        self._holding.sort_out(batch, records)
        try:
            await self._begin_work(used)
            while part := batch.part():
                try:
                    await self._attempt(batch, part, used)
                    batch.committed()
                except Cut as cut:
                    batch.cut(cut.index)
                except Culprit as culprit:
                    self.counts.retried += await self._holding.blame(batch, part[culprit.index], culprit.error)
                except Unattributed as problem:
                    alone = batch.narrow()
                    if alone is not None:
                        self.counts.retried += await self._holding.blame(batch, alone, problem.error)
                except Exhausted as exhausted:
                    await self._holding.exhausted(batch, part, exhausted)
                except Stop as stop:
                    await self._holding.stop(batch, stop.record)
                except Wait as wait:
                    await self._holding.wait(batch, part, wait)
                except Again as again:
                    batch.tries += 1
                    log.info("batch_retried", reason=str(again), times=batch.tries, records=len(part))
                    await asyncio.sleep(classify.backoff(batch.tries))
            await self._ahead.settle()
        except BaseException:
            await self._ahead.drop()
            await self._abandon(records, used)
            raise
        finally:
            self._source.release(used)
            self._holding.begin()

    def _prepare(self, records: Sequence[Record], used: Sequence[Assignment]) -> None:
        """Some run alone: those that act outside, and those that have a history."""
        if self._acts:
            for record in records:
                record.alone = record.acts
        for assignment in used:
            if assignment.attempts or assignment.suspect is not None:
                for record in records:
                    if record.assignment is assignment:
                        record.attempts = assignment.attempts.get(record.message.offset, 0)
                        record.alone |= record.attempts > 0
                        self._quarantine(record)

    def _quarantine(self, record: Record) -> None:
        """Of a record that was at work, and no other, when the last of too many owners died."""
        # The first death had nobody to tell of it, the second told of its neighbours too; one more may be a chance.
        enough = max(2, self._settings.failure.quarantine_after - 2)
        offset = record.message.offset
        if record.assignment.suspect == range(offset, offset + 1) and record.assignment.deaths >= enough:
            record.failure = classify.quarantined(record.assignment.deaths)
            record.assignment.caution = 0  # it is found

    async def _mark(self, assignment: Assignment, offsets: range | None) -> None:
        """Where owners keep dying: tell the next one which records it was at."""
        if assignment.caution:
            async with self._control.use() as connection:
                await self._ledger.try_(connection, assignment.partition, assignment.epoch, offsets)

    async def _begin_work(self, used: Sequence[Assignment]) -> None:
        """Once for each owner: if it dies before its first commit, the next one knows that it had begun."""
        begun = [assignment for assignment in used if not assignment.begun]
        if begun:
            async with self._control.use() as connection:
                await self._ledger.begin_work(connection, [(a.partition, a.epoch) for a in begun])
            for assignment in begun:
                assignment.begun = True

    async def _abandon(self, records: Sequence[Record], used: Sequence[Assignment]) -> None:
        """The batch was cut off while we live on: nothing that was begun must look as if it had killed us."""
        fruitless = [assignment for assignment in used if assignment.begun and not assignment.committed]
        try:
            async with asyncio.timeout(ABANDON_SECONDS), self._control.use() as connection:
                await self._inbox.abandon(connection, records, ended=False)
                await self._ledger.begin_work(connection, [(a.partition, a.epoch) for a in fruitless], -1)
                for assignment in used:
                    if assignment.caution:
                        await self._ledger.try_(connection, assignment.partition, assignment.epoch, None)
        except Exception as error:  # at worst it is counted once too often
            log.debug("attempts_not_abandoned", reason=str(error))
        else:
            for assignment in fruitless:
                assignment.begun = False

    async def _attempt(self, batch: Remaining, part: Sequence[Record], used: Sequence[Assignment]) -> None:
        try:
            await self._unless_lost(self._try(batch, part), used)
        except BaseException as error:
            let_go(error)
            await self._ahead.drop()  # whatever follows must not have to wait for what comes later
            raise

    async def _try(self, batch: Remaining, part: Sequence[Record]) -> None:
        if told(part) and part[0].alone:
            await self._attempts.begin(part)
        await self._commit(batch, part)

    async def _commit(self, batch: Remaining, records: Sequence[Record]) -> None:
        """Steps 3 to 8 of the protocol. Postgres commits before Kafka, never after.

        A crash between the two leaves stored outputs and an offset that has not moved, which
        recovery repairs. Reversed, the offset would pass work that Postgres then forgets.
        """
        began = asyncio.get_running_loop().time()
        await self._ahead.ready()
        async with self._ahead.session.use() as connection:
            try:
                claims = await self._ahead.claims(connection, records) or await self._claim(connection, records)
                failpoints.reach("after_claim")
                work = await self._handle(records, claims)
                undone = self._undone(records, claims)
                parked = [record for record in undone if record.parked]
                failed = [record for record in undone if not record.parked]
                if failed and self._settings.failure.policy == "halt":
                    raise Stop(failed[0])
                self._check_budget(records, failed)
                self._write_letters(work, failed)
                await self._check_topics(records, work)
                failpoints.reach("after_handlers")
                await self._inbox.keep(connection, undone, park=self._parks)
                await self._inbox.keep_results(connection, work.results)
                await self._publications.room()
                failpoints.reach("before_ledger")
                shares, sent = self._shares(records, work), self._sent()
                await self._advance(connection, shares, sent)
                failpoints.reach("after_ledger")
            except Exception as error:
                await self._roll_back(connection)
                self._raise_attributed(error, batch, records)
            failpoints.reach("before_postgres_commit")
            try:
                # Postgres answers the COMMIT of a transaction that has failed with ROLLBACK, and with no error.
                if await connection.execute("COMMIT") != "COMMIT":
                    raise BatchAborted("Postgres rolled the batch back")
            except Exception as error:
                # Refused, so surely not committed; if the answer was lost, `use` turns it into ConnectionLost.
                self._raise_attributed(error, batch, records)
        failpoints.reach("after_postgres_commit")
        self._last_took = asyncio.get_running_loop().time() - began
        self._turns.committed()
        self._careful = {what: left - 1 for what, left in self._careful.items() if left > 1}
        self._careful |= dict.fromkeys(work.refused, CAREFUL_BATCHES)
        self._forgotten(sent)
        self._advanced(shares, records, failed)
        parked_keys.remember(undone, park=self._parks)
        self._unmarked |= {assignment: share.next_offset for assignment, share in shares.items() if share.outputs}
        parcels = [work.outgoing[assignment] for assignment in shares if assignment in work.outgoing]
        more = self._has_more() and not any(assignment.leaving for assignment in shares)
        self._publications.add(CommittedBatch(shares, parcels), more=more)
        self._count(records, claims, failed, parked, work)

    async def _handle(self, records: Sequence[Record], claims: Claims) -> BatchResult:
        cautious = any(assignment.caution for assignment in assignments_of(records))
        handling = BatchRun(
            self._settings,
            self._ahead.session,
            self._judge,
            records,
            claims,
            careful=self._careful.keys(),
            mark=self._mark if cautious else None,
            meanwhile=lambda: None if told(records) else self._ahead.start(self._last_took),
            stalls=self._stalls,
        )
        await handling.run()
        return await handling.work()

    async def _claim(self, connection: Connection, records: Sequence[Record]) -> Claims:
        await self._turns.begin(connection)
        failpoints.reach("before_claim")
        await parked_keys.sort_out(connection, records, park=self._parks)
        claims = await self._inbox.claim(connection, records)
        if claims.newly_failed and self._parks:
            raise Again("a message that fails for its id parks its key")
        return claims

    def _undone(self, records: Sequence[Record], claims: Claims) -> list[Record]:
        """Those of ours that failed or have to wait."""
        if not told(records):
            return []
        return [
            record for record in map(records.__getitem__, claims.mine) if record.failure is not None or record.parked
        ]

    def _advanced(self, shares: dict[Assignment, Advance], records: Sequence[Record], failed: Sequence[Record]) -> None:
        """What a partition may forget, and must remember, now that it stands further on."""
        sizes = sizes_of(records)
        bad = set(failed)
        for assignment, share in shares.items():
            assignment.position = share.next_offset
            assignment.caution = max(0, assignment.caution - sizes[assignment])
            assignment.committed = True
            if assignment.suspect is not None and assignment.suspect.stop <= share.next_offset:
                assignment.suspect = None  # it has come through
            for offset in [offset for offset in assignment.attempts if offset < share.next_offset]:
                del assignment.attempts[offset]
            self._holding.advanced(assignment)
            outcomes = _outcomes(records, bad, assignment) if bad else [False] * sizes[assignment]
            self._budget(assignment).count(outcomes)

    def _budget(self, assignment: Assignment) -> Budget:
        if assignment.budget is None:
            assignment.budget = Budget(self._settings.failure)
        return assignment.budget

    def _check_budget(self, records: Sequence[Record], failed: Sequence[Record]) -> None:
        bad = set(failed)
        for assignment in assignments_of(failed):
            reason = self._budget(assignment).exceeded(_outcomes(records, bad, assignment))
            if reason is not None:
                raise Exhausted(assignment, reason)

    def _write_letters(self, work: BatchResult, failed: Sequence[Record]) -> None:
        """Dead letters are outputs like any other: they go out with the offset, or not at all.

        None for a message that fails once more in a way that a letter has told of already.
        """
        now = datetime.now(UTC)
        for record in failed:
            assert record.failure is not None
            if record.failure.way in record.failed_as:
                continue
            topic = self._settings.dead_letter_topic(record.message.topic)
            if topic is not None and record.message.offset >= record.assignment.silent_below:
                letter = letters.letter(record, topic, self._consumer, self._version, now, self._max_output)
                work.add(record.assignment, EncodedOutputs.of([letter]))
        for assignment in assignments_of(failed):
            if assignment in work.outgoing:
                work.outgoing[assignment] = work.outgoing[assignment].sorted()

    async def _check_topics(self, records: Sequence[Record], work: BatchResult) -> None:
        """A missing topic is a mistake of the deployment, not of a message: it waits until the topic is there.

        Its partition with it, from this message on; what comes before it is committed first.
        """
        topics = work.topics
        if self._cluster.knows(topics):
            return
        missing = await asyncio.to_thread(self._cluster.missing, topics)
        senders = work.sent_to(missing)
        for index, record in enumerate(records if missing else ()):
            if topic := senders.get((record.assignment, record.message.offset)):
                if index:
                    raise Cut(index)
                raise Wait(
                    f"{record.coordinates} ({record.message.id}): {record.handler} sends to {topic}, "
                    "a topic that does not exist; create it",
                    [record.assignment],
                )

    def _shares(self, records: Sequence[Record], work: BatchResult) -> dict[Assignment, Advance]:
        return {
            assignment: Advance(
                assignment.partition,
                assignment.epoch,
                assignment.position,
                next_offset,
                work.packed(assignment),
                assignment.published,
                assignment.caution > 1,
            )
            for assignment, next_offset in ends_of(records).items()
        }

    async def _advance(
        self, connection: Connection, shares: dict[Assignment, Advance], sent: dict[Assignment, Sent]
    ) -> None:
        ours = await self._ledger.advance(connection, list(shares.values()), list(sent.values()))
        others = [str(share.partition) for share in shares.values() if share.partition not in ours]
        if others:
            raise Fenced(f"{', '.join(others)}: another instance has raised the epoch")

    async def _roll_back(self, connection: Connection) -> None:
        try:
            await connection.execute("ROLLBACK")
        except Exception as error:  # the connection is of no use; Postgres rolls back by itself
            log.debug("rollback_failed", error=str(error))
            connection.terminate()

    def _raise_attributed(self, error: Exception, batch: Remaining, records: Sequence[Record]) -> NoReturn:
        """Raise an error as `_process` needs it: whose fault it is, or whether to come again."""
        in_handler = isinstance(error, HandlerError)
        if isinstance(error, HandlerError):
            envelope, inside = error, error.__cause__
            assert isinstance(inside, Exception)
            # What is raised here has the envelope as its context: without this they would go round in a circle.
            envelope.__cause__ = envelope.__context__ = None
            error = inside
        attributed = isinstance(error, ProcessorError | Culprit | Cut | Again | Wait | Exhausted | Stop)
        cause = error.error if isinstance(error, Culprit) else error
        if sqlstates.is_deadlock(cause):
            self._turns.deadlocked()
        if self._ahead.session.broken(error) or (attributed and not isinstance(error, Culprit)):
            raise error
        text = f"{type(cause).__name__}: {text_of(cause)}"
        if isinstance(error, BusyElsewhere):
            seconds = None if error.seconds is None else max(SHORTEST_WAIT_SECONDS, error.seconds)
            raise Wait(str(error), [error.record.assignment], seconds, outage=False) from error
        if not in_handler and isinstance(cause, TimeoutError):
            raise ConnectionLost("the database does not answer in time") from error
        passing = sqlstates.is_passing(cause) and not (in_handler and self._judge.is_explicit(cause))
        if passing and (batch.tries < TRIES_IN_PLACE or not in_handler):
            raise Again(text) from error
        if isinstance(error, Culprit):
            raise error
        if sqlstates.is_outage(error) or (in_handler and self._judge.kind(error) is Kind.OUTAGE):
            raise Wait(text, assignments_of(records)) from error
        if isinstance(error, QueuedWriteFailed) and error.what not in self._careful:
            self._careful[error.what] = CAREFUL_BATCHES
            raise Again(text) from error
        if not in_handler and not sqlstates.is_about_data(error) and not sqlstates.is_bystander(error):
            raise error
        raise Unattributed(error) from error

    async def _unless_lost(self, work: Coroutine[Any, Any, None], used: Sequence[Assignment]) -> None:
        """Cut the work off at once when a partition that it is for is lost."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                self._source.lost.clear()
                if not all(assignment.owned for assignment in used):
                    raise Fenced("a partition was lost while its records were being processed")
                lost = asyncio.ensure_future(self._source.lost.wait())
                try:
                    await asyncio.wait({task, lost}, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    lost.cancel()
            task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                if not task.cancelled():
                    task.exception()  # of no interest any more: the facts are read from both systems

    # --- publishing ---

    async def _mark_sent(self) -> None:
        """Let the ledger forget outputs that Kafka has, so that an operator's rewind does not send them again."""
        await self._publications.finish()
        self._unmarked = {assignment: end for assignment, end in self._unmarked.items() if assignment.owned}
        sent = self._sent()
        if sent:
            async with self._control.use() as connection:
                await self._ledger.mark_sent(connection, list(sent.values()))
            self._forgotten(sent)  # and nothing that a recovery has found meanwhile

    async def _move_on(self) -> None:
        """Past markers and aborted records: where they are all that is left, they may expire before a record comes.

        What is left behind in ledger and Kafka is that of a batch without records.
        """
        now = asyncio.get_running_loop().time()
        self._move_on_at = now + IDLE_SECONDS
        shares = {
            a: Advance(a.partition, a.epoch, a.position, a.empty.stop, None, a.published, a.caution > 0)
            for a in self._source.active()
            if a.position in a.empty and not a.leaving
        }
        if shares:
            self._move_on_at = now + MOVE_ON_SECONDS
            async with self._control.use() as connection:
                ours = await self._ledger.advance(connection, list(shares.values()), ())
            shares = {a: share for a, share in shares.items() if share.partition in ours}
            for assignment, share in shares.items():
                assignment.position = share.next_offset
            self._publications.add(CommittedBatch(shares, ()), more=False)

    def _sent(self) -> dict[Assignment, Sent]:
        """How much of what is stored Kafka is known to have."""
        return {a: Sent(a.source, a.epoch, a.published) for a in self._unmarked if a.owned}

    def _forgotten(self, sent: dict[Assignment, Sent]) -> None:
        for assignment, one in sent.items():
            if self._unmarked[assignment] <= one.published:
                del self._unmarked[assignment]

    # --- taking partitions, and the way back from trouble ---

    def _recover_new(self) -> None:
        for task in [task for task in self._recoveries if task.done()]:
            del self._recoveries[task]
            task.result()
        new = self._source.take_new()
        if new:
            self._begin_recovery(new)

    async def _start_over(self, trouble: Exception, used: Sequence[Assignment]) -> None:
        """Recover the partitions that something went wrong for; the others go on."""
        await self._ahead.drop()
        affected = set(used)
        try:
            await self._publications.finish()
        except Trouble:
            affected |= await self._publications.abandon()
        recovering = set(chain.from_iterable(self._recoveries.values()))
        candidates = [a for a in (*self._source.active(), *self._holding.owned()) if a not in recovering]
        affected_ones = [a for a in candidates if a in affected or not affected]
        log.warning(
            "starting_over",
            reason=str(trouble),
            kind=type(trouble).__name__,
            partitions=[str(assignment.partition) for assignment in affected_ones],
        )
        self._source.suspend(affected_ones)
        for assignment in affected_ones:
            self._unmarked.pop(assignment, None)
        if affected_ones:  # else they are another one's business already
            self._begin_recovery(affected_ones, str(trouble))

    def _begin_recovery(self, assignments: list[Assignment], reason: str | None = None) -> None:
        """Beside the work on other partitions."""
        task = asyncio.create_task(self._recover_all(assignments, reason))
        task.add_done_callback(lambda _: self._source.news.set())
        self._recoveries[task] = assignments

    async def _recover_all(self, assignments: list[Assignment], reason: str | None) -> None:
        """Bring these in step and start reading them; those that do not go come again until they do, or are not ours.

        A partition leaves the list when it is done with: what goes wrong with it later is not this recovery's business.
        """
        tries = 0
        recovery_of = object()
        if reason is not None:
            self._readiness.obstruct(recovery_of, reason)
        try:
            while not self._stopping:
                assignments[:] = [assignment for assignment in assignments if not assignment.leaving]
                if not assignments:
                    return
                try:
                    left = await self._takeover.recover(assignments, tries)
                except Trouble as trouble:
                    if any(assignment.leaving for assignment in assignments):
                        continue  # it is no longer our business, and the others need not wait
                    left = dict.fromkeys(assignments, str(trouble))
                assignments[:] = left
                if left:
                    tries += 1
                    reason = "; ".join(dict.fromkeys(left.values()))
                    self._readiness.obstruct(recovery_of, reason)
                    partitions = [str(assignment.partition) for assignment in left]
                    log.warning("recovery_retried", reason=reason, tries=tries, partitions=partitions)
                    await asyncio.sleep(classify.backoff(tries))
        finally:
            self._readiness.clear(recovery_of)

    async def _finish(self) -> None:
        """Leave nothing open and nothing to repair."""
        await self._abandon((), self._source.owned())
        try:
            await self._mark_sent()
            await self._move_on()
            await self._publications.finish()
        except Trouble as trouble:
            log.warning("left_to_recovery", reason=str(trouble))

    def _count(
        self,
        records: Sequence[Record],
        claims: Claims,
        failed: Sequence[Record],
        parked: Sequence[Record],
        work: BatchResult,
    ) -> None:
        counts = self.counts
        counts.batches += 1
        counts.records += len(records)
        counts.failed += len(failed)
        counts.parked += len(parked)
        counts.completed += len(claims.mine) - len(failed) - len(parked)
        counts.duplicates += claims.skipped.get(PriorDelivery.DUPLICATE, 0) + claims.skipped.get(
            PriorDelivery.REDELIVERY, 0
        )
        counts.collisions += len(claims.collisions)
        counts.outputs += sum(map(len, work.outgoing.values()))
        for record in failed:
            assert record.failure is not None
            log.warning(
                "message_failed",
                message_id=record.message.id,
                at=record.coordinates,
                reason=record.failure.reason,
                detail=record.failure.detail,
            )
        for record in parked:
            log.info("message_parked", message_id=record.message.id, at=record.coordinates)
        for record in claims.collisions:
            log.warning("message_collided", message_id=record.message.id, at=record.coordinates)


def _outcomes(records: Sequence[Record], failed: set[Record], assignment: Assignment) -> list[bool]:
    """Who failed, for the budget. What an operator sends once more was counted the first time."""
    return [record in failed for record in records if record.assignment is assignment and not record.redriven]
