"""Ends Kafka transactions that dead processes left open.

Until one is ended, committed readers see no records written after its own, and the committed offsets of the dead
process's partitions are not final. The ledger names the slots that may have a transaction open, and Postgres's locks
show which of these belong to a living process. The guarantee does not depend on this: the transaction's time-out ends
whatever is left.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from processor.errors import BatchAborted, ConnectionLost
from processor.kafka.producer import end_left_open
from processor.observe.events import OrphansNotSeen

if TYPE_CHECKING:
    from processor.observe.events import Emit
    from processor.postgres.ledger import Ledger
    from processor.postgres.session import Session
    from processor.postgres.slots import Slot
    from processor.settings.kafka import KafkaSettings

LOOK_SECONDS = 0.2
# How soon to look again after Postgres could not be asked: until then our own slot may look free.
RETRY_SECONDS = 1.0
# After we lost Postgres, others may have lost it too: how long they have to lease their slots again.
PATIENCE_SECONDS = 5.0


class Orphans:
    def __init__(self, settings: KafkaSettings, session: Session, slot: Slot, ledger: Ledger, emit: Emit) -> None:
        self._settings = settings
        self._emit = emit
        self._session = session
        self._slot = slot
        self._ledger = ledger

    async def watch(self) -> None:
        """End transactions of dead processes. Runs until it is cancelled."""
        before: set[int] | None = None
        leases = self._slot.leases
        while True:
            try:
                await self._slot.lease()
                if leases != self._slot.leases:
                    leases, before = self._slot.leases, None
                    await asyncio.sleep(PATIENCE_SECONDS)
                    continue
                leased = await self._leased()
                if self._slot.number in leased:  # otherwise we have lost the connection since `lease`
                    gone = before is None or before - leased
                    before = leased if not gone or await self._end_all(leased) else None
                    await asyncio.sleep(LOOK_SECONDS)
            except (BatchAborted, ConnectionLost) as trouble:
                self._emit(OrphansNotSeen(str(trouble)))
                await asyncio.sleep(RETRY_SECONDS)

    async def _leased(self) -> set[int]:
        async with self._session.use() as connection:
            return await self._slot.leased(connection)

    async def _end_all(self, leased: set[int]) -> bool:
        async with self._session.use() as connection:
            named = await self._ledger.slots(connection)
        ended = True
        for slot in sorted(named - leased):
            ended &= await self._end(slot)
        return ended

    async def _end(self, slot: int) -> bool:
        """End a slot's transaction; return whether nothing is left to do about it."""
        async with self._slot.ending(slot) as free:
            if not free:
                return True
            if not await asyncio.to_thread(end_left_open, self._settings, self._slot.name(slot)):
                return False
            async with self._session.use() as connection:
                await self._ledger.forget_slot(connection, slot)
            return True
