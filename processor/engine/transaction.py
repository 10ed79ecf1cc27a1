"""The one Postgres transaction of a batch: inbox rows, handlers' rows, positions and outputs, all or none.

Every BEGIN, COMMIT and ROLLBACK of a batch is here.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from processor import failpoints
from processor.engine.failing.outcomes import Again, Cut, Wait
from processor.errors import BatchAborted, ConnectionLost, Fenced, ProcessorError
from processor.observe.events import RollbackFailed
from processor.postgres.claims import BusyElsewhere, Claims, CutBefore
from processor.postgres.deadlocks import HAS_TURN
from processor.postgres.session import Connection, Session

if TYPE_CHECKING:
    from processor.engine.failing.conclude import Ends
    from processor.engine.failing.parking import Parking
    from processor.engine.job import Job
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.handling.result import BatchResult
    from processor.messages.batch import Batch
    from processor.messages.record import Record
    from processor.observe.events import Emit
    from processor.postgres.claims import Claiming
    from processor.postgres.deadlocks import DeadlockGate
    from processor.postgres.inbox import Inbox
    from processor.postgres.ledger import Advance, Ledger, Sent
    from processor.postgres.recall import Recall

# The shortest wait for a message that is busy elsewhere, however soon its lease expires.
SHORTEST_WAIT_SECONDS = 0.2


class Transactions:
    def __init__(
        self,
        job: Job,
        claiming: Claiming | Recall,
        inbox: Inbox,
        ledger: Ledger,
        gate: DeadlockGate,
        parking: Parking,
        partitions: Partitions,
        emit: Emit,
    ) -> None:
        self.session = Session(job.settings, "work")
        self.job = job
        self.claiming = claiming
        self.inbox = inbox
        self.ledger = ledger
        self.gate = gate
        self.parking = parking
        self.partitions = partitions
        self.emit = emit
        self.begun: Begun | None = None

    @asynccontextmanager
    async def open(self, batch: Batch) -> AsyncIterator[Transaction]:
        """Open a transaction that is rolled back unless it is committed."""
        async with self.session.use() as connection:
            transaction = Transaction(self, connection, batch)
            try:
                if self.begun is None or self.begun.connection is not connection:
                    await self.session.statements.look_up_footprints()
                yield transaction
            except Exception as error:
                await transaction.close()
                if isinstance(error, TimeoutError):  # the outcome of a cancelled statement is unknown
                    raise ConnectionLost("the database does not answer in time") from error
                raise
            await transaction.close()

    async def rest(self) -> None:
        """End the transaction that was begun for a next batch, which has not come: an idle one would hold its turn."""
        begun, self.begun = self.begun, None
        if begun is not None:
            try:
                async with self.session.use() as connection:
                    if connection is begun.connection:
                        await connection.execute("ROLLBACK")
            except (ProcessorError, TimeoutError):
                await self.session.drop()  # and the transaction with it

    async def close(self) -> None:
        await self.session.close()


@dataclass(frozen=True, slots=True)
class Begun:
    """A transaction without a batch yet: the commit of the one before has begun it."""

    connection: Connection
    has_turn: bool


class Transaction:
    def __init__(self, transactions: Transactions, connection: Connection, batch: Batch) -> None:
        self._connection = connection
        self._batch = batch
        self._of = transactions
        self.session = transactions.session
        self._round_trips = transactions.session.round_trips
        self._open = True

    async def claim(self) -> Claims | Cut | Wait | Again:
        """Begin, and decide which of the records are ours to handle."""
        claims = await self._claim()
        if isinstance(claims, Claims):
            failpoints.reach("after_claim")
            self._round_trips.purpose = "handlers"
        return claims

    async def _claim(self) -> Claims | Cut | Wait | Again:
        await self._begin()
        failpoints.reach("before_claim")
        await self._of.parking.sort_out(self._connection, self._batch)
        claims = await self._of.claiming.claim(self._connection, self._batch)
        if claims is None:
            # The transaction holds nothing else yet. A savepoint would make everything after it a subtransaction.
            await self._begin(anew=True)
            claims = await self._of.claiming.claim(self._connection, self._batch)
        match claims:
            case CutBefore(index):
                return Cut(index)
            case BusyElsewhere(record, seconds):
                reason = f"message {record.message.id} is being processed elsewhere"
                seconds = None if seconds is None else max(SHORTEST_WAIT_SECONDS, seconds)
                return Wait(reason, [self._of.partitions.of(record.reading)], seconds, outage=False)
            case Claims(newly_failed=True) if self._of.parking.parks:
                return Again("a message fails because of its id and parks its key")
        assert claims is not None  # a second COPY is never tried after one that has failed
        return claims

    async def _begin(self, *, anew: bool = False) -> None:
        begun, self._of.begun = self._of.begun, None
        if begun is not None and begun.connection is self._connection:
            if begun.has_turn:
                self._round_trips.purpose = "claim"
                return
            anew = True
        gate = self._of.gate
        self._round_trips.purpose = "begin"
        await gate.wait_for_turn(self._connection, gate.begin_sql(anew=anew))
        self._round_trips.purpose = "claim"

    @asynccontextmanager
    async def handling(self) -> AsyncIterator[None]:
        """While handlers run; takes back what they have written if their rows are not to be kept."""
        if not self._of.job.keeps_rows:
            await self._connection.execute("SAVEPOINT handlers")
        yield
        if not self._of.job.keeps_rows:
            await self._connection.execute("ROLLBACK TO SAVEPOINT handlers")

    async def keep(self, undone: Sequence[Record], results: Sequence[tuple[Record, str]]) -> None:
        """Keep failed and parked records as they came, and the results of handlers."""
        failpoints.reach("after_handlers")
        if not self._of.job.keeps_rows:
            return
        self._round_trips.purpose = "keep"
        await self._of.inbox.keep(self._connection, undone, park=self._of.parking.parks)
        await self._of.inbox.keep_results(self._connection, results)

    async def advance(self, shares: Sequence[Advance], sent: Sequence[Sent]) -> None:
        """Move the ledger to the end of the batch and store its outputs; raise Fenced if another instance owns one."""
        failpoints.reach("before_ledger")
        self._round_trips.purpose = "ledger"
        ours = await self._of.ledger.advance(self._connection, shares, sent)
        others = [str(share.partition) for share in shares if share.partition not in ours]
        if others:
            raise Fenced(f"{', '.join(others)}: another instance has raised the epoch")
        failpoints.reach("after_ledger")

    async def count(self, shares: Sequence[OwnedPartition], claims: Claims, ends: Ends, result: BatchResult) -> None:
        """Keep what the batch has come to, where the job keeps that."""
        await self._of.job.count(self._connection, self._batch, shares, claims, ends, result)

    async def commit(self, *, more: bool) -> dict[str, int]:
        """Commit; if `more` batches are there already, begin the next transaction in the same round trip.

        Returns the round trips by their purpose since the commit before, with those of attempts that were rolled back.
        If the answer is lost, so is the connection, and recovery reads the outcome from the ledger.
        """
        failpoints.reach("before_postgres_commit")
        self._round_trips.purpose = "commit"
        self._open = False
        more = more and not self.session.statements.have_footprints_to_look_up  # that is done between transactions
        both = self._of.gate.commit_and_begin_sql() if more else None
        try:
            status = await self._connection.execute(both or "COMMIT")
        except Exception as error:
            if both is not None and not self._connection.is_closed() and self._connection.is_in_transaction():
                raise ConnectionLost("the next transaction could not begin; this one was committed") from error
            raise
        if both is not None:  # `advance` has just gone through, so this was no COMMIT of a failed transaction
            self._of.begun = Begun(self._connection, status == HAS_TURN)
        elif status != "COMMIT":  # Postgres answers the COMMIT of a failed transaction with ROLLBACK, without an error
            raise BatchAborted("Postgres rolled the batch back")
        failpoints.reach("after_postgres_commit")
        self._of.gate.committed()
        return self._round_trips.take()

    async def close(self) -> None:
        """Roll back unless it was committed."""
        if not self._open:
            return
        self._open = False
        self._round_trips.purpose = "other"
        try:
            await self._connection.execute("ROLLBACK")
        except Exception as error:  # the connection is unusable; Postgres rolls back by itself
            self._of.emit(RollbackFailed(str(error)))
            self._connection.terminate()
