"""Finds the message that killed our predecessors, without trying every message alone, and quarantines it.

A message may kill its process: out of memory, a crash in native code, a handler that calls os._exit. The next owner
meets it again. Three kinds of evidence survive a death, and each narrows the search:

- the ledger counts owners that began to work and have committed nothing since (`unfinished_owners`). If there is one,
  the next owner marks which records it is handling, a piece at a time, before their handlers run;
- the ledger keeps the offsets in progress at a death as `suspects`, and counts the owners in a row that died at exactly
  these. Suspects are marked one by one, so that after another death a single record is left;
- an inbox row counts attempts that never ended, for messages that are tried alone.

A message that has killed `failure.quarantine_after` processes fails without being tried again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from processor.engine.failing import classify

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.messages.batch import Batch
    from processor.messages.message import Partition
    from processor.messages.record import Record
    from processor.postgres.ledger import Ledger, LedgerRow
    from processor.postgres.session import Session
    from processor.settings.schema import Settings

# Records marked per write while looking for a suspect: the largest batch has about as many pieces as a piece records.
PIECE = 64
# The first death leaves no mark, and the second one the mark of a whole piece. Only later ones mark a single record.
UNMARKED_DEATHS = 2
# A single death at a record may be a coincidence.
FEWEST_MARKED_DEATHS = 2


class CrashTracker:
    def __init__(self, settings: Settings, partitions: Partitions, session: Session, ledger: Ledger) -> None:
        self._quarantine_after = settings.failure.quarantine_after
        self._batch_size = settings.batch.max_messages
        self._partitions = partitions
        self._session = session
        self._ledger = ledger

    def taken_over(self, owned: OwnedPartition, row: LedgerRow, start: int) -> None:
        """Learn from the ledger how the owners before us ended."""
        crashes = owned.crashes
        crashes.records_to_mark = self._batch_size if row.unfinished_owners else 0
        if row.suspects is not None and row.suspects.stop > start:
            crashes.suspects, crashes.deaths = row.suspects, row.deaths

    def prepare(self, batch: Batch, used: Sequence[OwnedPartition]) -> None:
        """Set apart the records that failed before or are suspects, and quarantine one that is known to be deadly."""
        with_history = {owned.partition: owned for owned in used if owned.attempts or owned.crashes.suspects}
        if not with_history:
            return
        for record in batch.as_rows():
            if (owned := with_history.get(record.partition)) is not None:
                record.attempts = owned.attempts.get(record.message.offset, 0)
                record.alone |= record.attempts > 0
                crashes, offset = owned.crashes, record.message.offset
                if crashes.suspects == range(offset, offset + 1) and crashes.deaths >= FEWEST_MARKED_DEATHS:
                    self.quarantine_if_deadly(record, crashes.deaths + UNMARKED_DEATHS, crashes.deaths)
                    if record.failure is not None:
                        crashes.records_to_mark = 0  # the search is over

    def quarantine_if_deadly(self, record: Record, killed: int, known: int | None = None) -> None:
        """Fail a record that has killed too many processes; its failure names `known` of them, which are certain."""
        if killed >= self._quarantine_after:
            record.failure = classify.quarantined(killed if known is None else known)

    async def begin(self, used: Iterable[OwnedPartition]) -> None:
        """Record in the ledger that we work on these, once per owner, so that the next one knows if we die at it."""
        new = [owned for owned in used if not owned.crashes.on_record]
        if new:
            async with self._session.use() as connection:
                await self._ledger.begin_work(connection, [(owned.partition, owned.epoch) for owned in new])
            for owned in new:
                owned.crashes.on_record = True

    async def abandon(self, used: Sequence[OwnedPartition]) -> None:
        """Take back the start of work: the batch was cancelled while we live, and must not look as if it killed us."""
        fruitless = [owned for owned in used if owned.crashes.on_record and not owned.crashes.committed]
        async with self._session.use() as connection:
            await self._ledger.begin_work(connection, [(owned.partition, owned.epoch) for owned in fruitless], -1)
            for owned in used:
                if owned.crashes.records_to_mark:
                    await self._ledger.mark_in_progress(connection, owned.partition, owned.epoch, None)
        for owned in fruitless:
            owned.crashes.on_record = False

    def committed(self, owned: OwnedPartition, next_offset: int, count: int) -> None:
        crashes = owned.crashes
        crashes.records_to_mark = max(0, crashes.records_to_mark - count)
        crashes.committed = True
        if crashes.suspects is not None and crashes.suspects.stop <= next_offset:
            crashes.suspects = None  # they were processed

    # --- for the run of the handlers ---

    def marker(self, batch: Batch) -> Marker | None:
        """Return the marker of a batch's records in progress, or None if no owner died at these partitions."""
        owned = [self._partitions.of(reading) for reading in batch.readings().values()]
        return Marker(self, owned) if any(one.crashes.records_to_mark for one in owned) else None

    async def mark(self, owned: OwnedPartition, offsets: range | None) -> None:
        """Record in the ledger which offsets are in progress, None for none, so that the next owner knows."""
        if owned.crashes.records_to_mark:
            async with self._session.use() as connection:
                await self._ledger.mark_in_progress(connection, owned.partition, owned.epoch, offsets)


class Marker:
    """Marks the records of one batch as in progress, piece by piece."""

    def __init__(self, tracker: CrashTracker, owned: Sequence[OwnedPartition]) -> None:
        self._tracker = tracker
        self._owned = {one.partition: one for one in owned}
        self._marked: OwnedPartition | None = None

    def pieces(self, records: Sequence[Record], indices: Sequence[int]) -> Iterable[Sequence[int]]:
        """Yield neighbours of one partition together, but each suspect alone."""
        piece: list[int] = []
        partition: Partition | None = None
        for index in indices:
            record = records[index]
            suspects = self._owned[record.partition].crashes.suspects
            alone = suspects is not None and record.message.offset in suspects
            if piece and (alone or len(piece) == PIECE or partition != record.partition):
                yield piece
                piece = []
            partition = record.partition
            piece.append(index)
            if alone:
                yield piece
                piece = []
        if piece:
            yield piece

    async def mark(self, first: Record, last: Record) -> None:
        owned = self._owned[first.partition]
        if owned is not self._marked:
            await self.end()  # otherwise a death at another partition would make these records suspects
        self._marked = owned
        await self._tracker.mark(owned, range(first.message.offset, last.message.offset + 1))

    async def end(self) -> None:
        if self._marked is not None:
            await self._tracker.mark(self._marked, None)
