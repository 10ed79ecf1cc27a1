"""Records the start of an attempt before it is made, so that an attempt that kills its process leaves a trace.

Only for messages that failed before, and for handlers that act outside: those are called here, outside any transaction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from processor import failpoints
from processor.engine.failing.outcomes import Culprit
from processor.errors import BatchAborted, ConnectionLost
from processor.handling.effects import Effect, EffectDatabase
from processor.handling.timeouts import HandlerTimeout, described
from processor.observe.events import AttemptsNotEnded, LeaseExpired, LeaseNotRenewed, NothingReaped

if TYPE_CHECKING:
    from processor.engine.crashes import CrashTracker
    from processor.engine.failing.parking import Parking
    from processor.engine.partitions import Partitions
    from processor.handling.registry import Routes
    from processor.messages.batch import Batch
    from processor.messages.record import Record
    from processor.observe.events import Emit
    from processor.observe.stalls import Stalls
    from processor.postgres.inbox import Inbox
    from processor.postgres.session import Session
    from processor.settings.schema import Settings


class Attempts:
    def __init__(
        self,
        settings: Settings,
        partitions: Partitions,
        routes: Routes,
        session: Session,
        leases: Session,
        inbox: Inbox,
        crashes: CrashTracker,
        parking: Parking,
        stalls: Stalls,
        emit: Emit,
    ) -> None:
        self._renew_seconds = settings.effects.lease_ms / 3000
        self._reap_seconds = settings.effects.reap_ms / 1000
        self._partitions = partitions
        self._routes = routes
        self._session = session
        self._leases = leases
        self._inbox = inbox
        self._crashes = crashes
        self._parking = parking
        self._stalls = stalls
        self._emit = emit
        # What handlers have done outside, by partition and offset, until it is committed. A batch that fails is handled
        # again, and records behind a waiting one are read again: their calls are not made a second time.
        self._effects: dict[tuple[int, int], Effect] = {}

    async def begin(self, batch: Batch) -> Culprit | None:
        """Record the start of attempts, and call the handlers that act outside; return the first that fails."""
        records = batch.as_rows()
        to_act: dict[object, list[int]] = {}  # by key, because messages of one key have to stay in order
        async with self._session.use() as connection:
            await self._parking.sort_out(connection, batch)
            seen: set[bytes] = set()
            for index, record in enumerate(records):
                if record.key in seen or record.failure or record.not_ours or record.parked:
                    continue
                if not record.in_inbox:
                    continue  # it has no row: memory counts its attempts, the ledger its deaths
                seen.add(record.key)
                if not await self._inbox.start(connection, record, leased=record.acts):
                    continue  # it is done, or another process has it: the claim finds out
                record.begun = True
                if self.effect_of(record) is not None:
                    continue  # its call has succeeded, so no process can die at it any more
                self._crashes.quarantine_if_deadly(record, record.unfinished)
                if record.failure is None and record.acts:
                    key = record.message.key
                    place = index if key is None else (record.reading.partition_id, key)
                    to_act.setdefault(place, []).append(index)
        if to_act:
            failpoints.reach("after_intent")
            culprit = await self._act_all(records, list(to_act.values()))
            if culprit is not None:
                await self._leave_others(records, culprit.index)
                return culprit
            failpoints.reach("after_effect")
        return None

    async def _leave_others(self, records: Sequence[Record], culprit: int) -> None:
        """End the attempts of the others for now: while the culprit waits, they must not look as if they killed us."""
        others = [record for index, record in enumerate(records) if index != culprit]
        done = [record for record in others if self.effect_of(record) is not None]
        async with self._session.use() as connection:
            await self._inbox.abandon(connection, done, ended=False)  # keeps the lease: no other may call
            await self._inbox.abandon(connection, [record for record in others if record.begun], ended=True)

    async def end(self, records: Sequence[Record]) -> None:
        """End attempts that do not count."""
        try:
            async with self._session.use() as connection:
                await self._inbox.abandon(connection, records, ended=True)
        except (BatchAborted, ConnectionLost) as trouble:  # at worst one attempt too many is counted
            self._emit(AttemptsNotEnded(str(trouble)))

    async def abandon(self, records: Sequence[Record]) -> None:
        """Take back attempts that were cancelled while we live: they must not look as if they killed us."""
        async with self._session.use() as connection:
            await self._inbox.abandon(connection, records, ended=False)

    def effect_of(self, record: Record) -> Effect | None:
        """Return what the record's handler has already done outside, or None."""
        return self._effects.get((record.reading.partition_id, record.message.offset))

    def forget(self) -> None:
        """Forget effects that are committed, or whose partition is no longer ours."""
        if self._effects:
            position = {owned.partition_id: owned.position for owned in self._partitions.owned()}
            self._effects = {
                (partition_id, offset): effect
                for (partition_id, offset), effect in self._effects.items()
                if partition_id in position and offset >= position[partition_id]
            }

    async def reap(self) -> None:
        """Free messages whose lease has expired, since its owner must have died. Runs until it is cancelled."""
        while True:
            await asyncio.sleep(self._reap_seconds)
            ours = [owned.partition_id for owned in self._partitions.owned() if owned.recovered]
            try:
                async with self._session.use() as connection:
                    for message_id in await self._inbox.reap(connection, ours):
                        self._emit(LeaseExpired(message_id))
            except Exception as error:  # keep running: nothing else does this; it tries again next time
                self._emit(NothingReaped(str(error)))

    async def _act_all(self, records: Sequence[Record], lanes: Sequence[Sequence[int]]) -> Culprit | None:
        failed: dict[int, Exception] = {}

        async def act(lane: Sequence[int]) -> None:
            for index in lane:
                try:
                    record = records[index]
                    effect = await self._act(record)
                    self._effects[record.reading.partition_id, record.message.offset] = effect
                except Exception as error:
                    failed[index] = error
                    return  # the later messages of its key wait

        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(act(lane))
        return Culprit(min(failed), failed[min(failed)]) if failed else None

    async def _act(self, record: Record) -> Effect:
        """Call the handler, and renew the message's lease meanwhile."""
        assert record.message_type is not None
        effect = Effect()
        renewal = asyncio.create_task(self._renew(record))
        try:
            with HandlerTimeout(self._stalls, lambda: described(record.message)) as timeout:
                route = self._routes.of(record.message_type)
                effect.value = await timeout.call(route, record.message, EffectDatabase(effect))
        finally:
            renewal.cancel()
        return effect

    async def _renew(self, record: Record) -> None:
        while True:
            await asyncio.sleep(self._renew_seconds)
            try:
                async with self._leases.use() as connection:
                    if not await self._inbox.renew(connection, record):
                        return  # the claim finds out who has it
            except (BatchAborted, ConnectionLost) as trouble:
                self._emit(LeaseNotRenewed(record.message.id, str(trouble)))
