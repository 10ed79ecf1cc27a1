"""Writes down in Postgres why partitions stand still, so that `processor status` can say it from any machine.

Beside the work, on the control session, and never in the way of a batch: what cannot be written is tried again with the
next look, and nothing depends on it. A partition that waits for less than a second is not worth a row.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from processor.engine.partitions import Obstacle
from processor.observe.events import TroublesNotWritten
from processor.postgres import troubles
from processor.postgres.troubles import Trouble

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.messages.message import Partition
    from processor.observe.events import Emit
    from processor.postgres.session import Session
    from processor.postgres.slots import Slot

LOOK_SECONDS = 0.5
WORTH_A_ROW = timedelta(seconds=1)
# How long the last look, at the end of the process, may take.
LAST_SECONDS = 2.0
REASON_CHARS = 1000


class TroubleNotes:
    def __init__(self, consumer: str, partitions: Partitions, session: Session, slot: Slot, emit: Emit) -> None:
        self._consumer = consumer
        self._partitions = partitions
        self._session = session
        self._slot = slot
        self._emit = emit
        self._backend: int | None = None  # that our rows name
        self._met: dict[Partition, int] = {}  # partitions whose older rows are gone, and the epoch we had then
        self._written: dict[Partition, tuple[int, Trouble]] = {}

    async def watch(self) -> None:
        """Write what changes. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._write(datetime.now(UTC) - WORTH_A_ROW)
            except Exception as error:  # keep running: nothing depends on it; it tries again next time
                self._emit(TroublesNotWritten(str(error)))

    async def leave(self) -> None:
        """At the end of the process: halted partitions keep their reason, nothing else is true any longer."""
        with suppress(Exception):
            async with asyncio.timeout(LAST_SECONDS):
                await self._write(datetime.now(UTC), only=Obstacle.HALTED)

    async def _write(self, older_than: datetime, only: Obstacle | None = None) -> None:
        owned = {partition.partition: partition for partition in self._partitions.owned()}
        wanted: dict[Partition, tuple[int, Trouble]] = {}
        for name, partition in owned.items():
            if (trouble := _trouble(partition, older_than, only)) is not None:
                wanted[name] = partition.epoch, trouble
        ended = {name: epoch for name, (epoch, _) in self._written.items() if name not in wanted}
        new = {name: one.epoch for name, one in owned.items() if one.recovered and self._met.get(name) != one.epoch}
        ended |= {name: epoch for name, epoch in new.items() if name not in wanted}
        changed = {name: row for name, row in wanted.items() if self._written.get(name) != row}
        backend = self._slot.backend
        moved = self._backend is not None and self._backend != backend
        if backend is None or not (ended or changed or (moved and self._written)):
            return
        async with self._session.use() as connection:
            if moved and self._backend is not None:  # our lock is held by another connection now
                ours = [(name, epoch) for name, (epoch, _) in self._written.items()]
                await troubles.clear(connection, self._consumer, self._backend, ours)
                self._written.clear()
                changed = wanted
            self._backend = backend
            if ended:
                await troubles.clear(connection, self._consumer, backend, list(ended.items()))
                for name in ended:
                    self._written.pop(name, None)
            if changed:
                rows = [(name, epoch, trouble) for name, (epoch, trouble) in changed.items()]
                await troubles.write(connection, self._consumer, backend, rows)
                self._written |= changed
        self._met = {name: epoch for name, epoch in (self._met | new).items() if name in owned}


def _trouble(partition: OwnedPartition, older_than: datetime, only: Obstacle | None) -> Trouble | None:
    found = partition.trouble
    if found is None or (only is not None and found[0] is not only):
        return None
    kind, trouble = found
    if kind is not Obstacle.HALTED and trouble.since > older_than:
        return None
    return Trouble(kind.value, _storable(trouble.reason), trouble.since)


def _storable(reason: str) -> str:
    """What comes from outside may hold what Postgres text cannot."""
    return reason.encode(errors="backslashreplace").decode().replace("\0", "\\0")[:REASON_CHARS]
