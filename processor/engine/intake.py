"""Steps 1 and 2: wait for records, and take the next batch of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processor.engine.publishing import PublishQueue
    from processor.kafka.reader import PartitionReader
    from processor.messages.batch import Batch
    from processor.observe.readiness import Readiness
    from processor.settings.schema import BatchSettings

IDLE_SECONDS = 1.0


class Intake:
    def __init__(
        self,
        settings: BatchSettings,
        reader: PartitionReader,
        publishing: PublishQueue,
        readiness: Readiness,
    ) -> None:
        self._max_messages = settings.max_messages
        self._linger_seconds = settings.linger_ms / 1000
        self._reader = reader
        self._publishing = publishing
        self._readiness = readiness
        self._backlog = False
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True
        self._reader.news.set()

    async def gather(self) -> None:
        """Let records come in while there is a reason to wait for more of them.

        A batch that is not full waits while Kafka works on the one before, and takes all records that come meanwhile.
        Under a backlog it waits `linger_ms` for more. A single message on an idle topic is never delayed.
        """
        if not (self._publishing.idle or self._reader.has_a_batch):
            self._publishing.hurry()
            await self._gather_until(lambda: self._publishing.idle, None)
        if self._backlog and self._reader.buffered:
            await self._gather_until(lambda: False, self._linger_seconds)
        self._reader.news.clear()

    def take(self) -> Batch | None:
        """Return the next batch, or None if there are no records."""
        batch = self._reader.take()
        self._backlog = len(batch) >= max(1, self._max_messages // 2)
        return batch or None

    async def idle(self) -> bool:
        """Wait for news; return whether there was none for a while."""
        try:
            async with asyncio.timeout(IDLE_SECONDS):
                await self._reader.news.wait()
        except TimeoutError:
            return True
        return False

    def look_for_the_group(self) -> None:
        if self._reader.outside:
            self._readiness.obstruct("outside", "the group has dropped us; are the brokers reachable?")
        else:
            self._readiness.clear("outside")

    async def _gather_until(self, enough: Callable[[], bool], seconds: float | None) -> None:
        """Wait until `enough` is true, a full batch is buffered, or the time is over."""
        try:
            async with asyncio.timeout(seconds):
                while not (self._stopping or enough() or self._reader.has_a_batch):
                    self._reader.news.clear()
                    await self._reader.news.wait()
                    self.look_for_the_group()
        except TimeoutError:
            pass
