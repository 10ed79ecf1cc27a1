"""The next batch, claimed while the one at hand is being handled: Postgres would have nothing to do meanwhile.

A claim ahead is an open transaction on a second connection. It holds keys of the inbox, and its consumer's turn
together with all others: nobody who is further on ever waits for it, and it waits for nobody but owners of the same
keys. Only the claim is ahead: handlers and ledger still follow each other batch by batch.

It is there to save time, never to decide: whenever the batch at hand does not go through, or anything is special
about the next one, the claim is taken back and made again in its turn.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from processor import failpoints
from processor.messages.batch import Records, assignments_of, usual
from processor.postgres.inbox import Claims, Inbox
from processor.postgres.session import Connection, Session

if TYPE_CHECKING:
    from collections.abc import Sequence

    from processor.kafka.reader import PartitionReader
    from processor.messages.record import Record
    from processor.postgres.deadlocks import DeadlockGate
    from processor.settings.schema import Settings

log = structlog.get_logger()

# A claim is not held for longer than about this: others may wait for its keys.
SHORT_SECONDS = 0.5
# After a claim that went wrong, perhaps because there is no second connection to be had, none is made for so long.
PAUSE_SECONDS = 10.0


class ClaimAhead:
    def __init__(self, settings: Settings, source: PartitionReader, inbox: Inbox, turns: DeadlockGate) -> None:
        self._batch_size = settings.batch.max_messages
        self._source = source
        self._inbox = inbox
        self._turns = turns
        self.session = Session(settings, "work")  # for the batch at hand
        self._other = Session(settings, "work ahead")
        self._next: Records | None = None
        self._claimed: Records | None = None  # the batch that the claim is for, when it has become the one at hand
        self._held: tuple[Connection, Claims | None] | None = None  # what was claimed for that one
        self._not_before = 0.0
        self._claim: asyncio.Task[tuple[Connection, Claims | None]] | None = None

    @property
    def has_next(self) -> bool:
        return self._next is not None

    def start(self, seconds: float) -> None:
        """Claim the next batch if there is a full one of usual records; `seconds` is what the last one took."""
        if (
            self._next is None
            and seconds < SHORT_SECONDS
            and time.monotonic() >= self._not_before
            and not self._turns.alone
            and self._inbox.copies(self._batch_size)
            and self._source.has_a_batch
        ):
            self._next = self._source.take()
            if usual(self._next) is not None:
                self._claim = asyncio.create_task(self._make(self._other, self._next))

    async def take(self) -> Records | None:
        """The next batch, if it was taken ahead; without what was lost, or is to be read again, in the meantime."""
        records, self._next = self._next, None
        if records is None:
            return None
        lost = self._source.outdated(records)
        if lost:
            try:
                await self.drop()
            except BaseException:
                self._source.release(assignments_of(records))
                raise
            self._source.release(lost)
            return Records([span for span in records.spans if span.assignment not in lost])
        if self._claim is not None:
            self._claimed = records
        return records

    async def ready(self) -> None:
        """Wait for the claim of the batch at hand. If it was made, its connection is the one for the batch."""
        if self._claim is None or self._claimed is None:
            return
        await asyncio.wait({self._claim})
        if self._claim.cancelled() or self._claim.exception() is not None:
            await self.drop()  # the claim that is made in its turn finds out what it means
            return
        self._held, self._claim = self._claim.result(), None
        self.session, self._other = self._other, self.session

    async def claims(self, connection: Connection, records: Sequence[Record]) -> Claims | None:
        """What was claimed ahead of these, in the transaction that is open on this connection; None if nothing was."""
        if self._held is None:
            return None
        (made_on, claims), claimed = self._held, self._claimed
        self._held = self._claimed = None
        if made_on is not connection:
            return None
        plain = claimed is records and usual(records) is not None
        if claims is None or not plain or any(a.parked_keys or a.caution for a in assignments_of(records)):
            await connection.execute("ROLLBACK")
            return None
        return claims

    async def settle(self) -> None:
        """The batch at hand is done: what was claimed for it, and that nobody asked for, is taken back."""
        if self._claimed is not None:
            await self.drop()

    async def drop(self) -> None:
        """Take the claim back, so that it is in nobody's way; the batch that it was for is still to be done."""
        task, held = self._claim, self._held
        self._claim = self._claimed = self._held = None
        if held is not None:
            await self.session.drop()
        if task is None:
            return
        if not task.done():
            task.cancel()
        await asyncio.wait({task})
        await self._other.drop()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("not_claimed_ahead", reason=str(error))
            self._not_before = time.monotonic() + PAUSE_SECONDS

    async def close(self) -> None:
        await self.drop()
        records, self._next = self._next, None
        if records is not None:
            self._source.release(assignments_of(records))
        await self.session.close()
        await self._other.close()

    async def _make(self, session: Session, records: Records) -> tuple[Connection, Claims | None]:
        bulk = usual(records)
        assert bulk is not None
        async with session.use() as connection:
            await self._turns.begin(connection)
            claims = await self._inbox.claim_unknown(connection, bulk)
            failpoints.reach("after_claim_ahead")
            return connection, claims
