"""What is put on record before a message is tried: that somebody begins, in case nobody lives to tell how it ended.

Only for messages with a history, and for handlers that act outside. A message that has taken enough processes with
it is not tried again: it is quarantined.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

import structlog

from processor import failpoints
from processor.engine.failing import classify
from processor.errors import BatchAborted, ConnectionLost
from processor.handling.effects import Effect, EffectDatabase
from processor.handling.timeouts import HandlerTimeout, described
from processor.messages.outcomes import Culprit
from processor.postgres import parked_keys

if TYPE_CHECKING:
    from processor.kafka.reader import PartitionReader
    from processor.messages.record import Record
    from processor.observe.stalls import Stalls
    from processor.postgres.inbox import Inbox
    from processor.postgres.session import Session
    from processor.settings.schema import Settings

log = structlog.get_logger()


class Attempts:
    def __init__(
        self, settings: Settings, source: PartitionReader, session: Session, inbox: Inbox, stalls: Stalls
    ) -> None:
        self._stalls = stalls
        self._quarantine_after = settings.failure.quarantine_after
        self._parks = settings.failure.policy == "park-key"
        self._renew_seconds = settings.effects.lease_ms / 3000
        self._reap_seconds = settings.effects.reap_ms / 1000
        self._source = source
        self._session = session
        self._inbox = inbox

    async def begin(self, records: Sequence[Record]) -> None:
        """Put the start of attempts on record; with handlers that act outside, make them.

        Raises Culprit for the first that fails.
        """
        to_act: dict[object, list[int]] = {}  # by key, which is where order matters
        async with self._session.use() as connection:
            await parked_keys.sort_out(connection, records, park=self._parks)
            seen: set[bytes] = set()
            for index, record in enumerate(records):
                if record.key in seen or record.failure or record.effect or record.foreign or record.parked:
                    continue
                if not record.in_inbox:
                    continue  # nobody would find the row again: its attempts are counted here, deaths in the ledger
                seen.add(record.key)
                if not await self._inbox.start(connection, record, leased=record.acts):
                    continue  # it is done, or someone else has it: the claim tells
                record.begun = True
                if record.starts >= self._quarantine_after:
                    record.failure = classify.quarantined(record.starts)
                elif record.acts:
                    key = record.message.key
                    place = index if key is None else (record.assignment.source, key)
                    to_act.setdefault(place, []).append(index)
        if to_act:
            failpoints.reach("after_intent")
            await self._act_all(records, list(to_act.values()))
            failpoints.reach("after_effect")

    async def reap(self) -> None:
        """For as long as we live: return what was leased by the dead."""
        while True:
            await asyncio.sleep(self._reap_seconds)
            sources = [assignment.source for assignment in self._source.owned() if assignment.known]
            try:
                async with self._session.use() as connection:
                    for message_id in await self._inbox.reap(connection, sources):
                        log.warning("lease_expired", message_id=message_id)
            except Exception as error:  # the next time, then: nobody else does it
                log.warning("nothing_reaped", reason=str(error))

    async def _act_all(self, records: Sequence[Record], lanes: Sequence[Sequence[int]]) -> None:
        failed: dict[int, Exception] = {}

        async def act(lane: Sequence[int]) -> None:
            for index in lane:
                try:
                    records[index].effect = await self._act(records[index])
                except Exception as error:
                    failed[index] = error
                    return  # what comes after it waits

        async with asyncio.TaskGroup() as group:
            for lane in lanes:
                group.create_task(act(lane))
        for index in sorted(failed):
            raise Culprit(index, failed[index]) from failed[index]

    async def _act(self, record: Record) -> Effect:
        """Call the handler, and keep its lease alive meanwhile."""
        assert record.route is not None
        effect = Effect()
        renewal = asyncio.create_task(self._renew(record))
        try:
            with HandlerTimeout(self._stalls, lambda: described(record.message)) as watch:
                effect.value = await watch.call(record.route, record.message, EffectDatabase(effect))
        finally:
            renewal.cancel()
        return effect

    async def _renew(self, record: Record) -> None:
        while True:
            await asyncio.sleep(self._renew_seconds)
            try:
                async with self._session.use() as connection:
                    if not await self._inbox.renew(connection, record):
                        return  # the claim will tell who has it
            except (BatchAborted, ConnectionLost) as trouble:
                log.warning("lease_not_renewed", message_id=record.message.id, reason=str(trouble))
