"""The engine of one process: the source, what all lines of batches share, and the lines.

Each partition belongs to one line, and a line processes one batch after the other. Lines share the poll thread and the
membership in the group; each has its own transactions, in Postgres and in Kafka. To everybody else they are
what two workers are to each other.
"""

from __future__ import annotations

import asyncio
import os
import socket
from dataclasses import asdict
from typing import TYPE_CHECKING

import structlog

from processor import identity
from processor.cluster import Cluster
from processor.consumer import Source
from processor.decode import Decoder
from processor.errors import SetupError
from processor.failures import Judge
from processor.ledger import Ledger
from processor.loop import Counts, Line, Tools
from processor.readiness import Readiness

if TYPE_CHECKING:
    from processor.config import Settings
    from processor.dispatch import Routes

log = structlog.get_logger()

PROGRESS_SECONDS = 10.0


class Engine:
    def __init__(self, settings: Settings, routes: Routes) -> None:
        self._settings = settings
        self._source = Source(settings, Decoder(settings, routes))
        self._cluster = Cluster(settings.kafka, settings.consumer)
        self._readiness = Readiness(settings.run.ready_file)
        self._counts = Counts()
        owner = f"{socket.gethostname()}:{os.getpid()}"
        tools = Tools(
            settings,
            self._source,
            self._cluster,
            asyncio.Lock(),
            Ledger(settings.consumer, owner),
            Judge(settings),
            self._readiness,
            self._counts,
            owner,
            identity.inbox_key(settings.consumer),
            bool(routes.effects),
        )
        self._lines = [Line(tools, share) for share in self._source.shares]

    def stop(self) -> None:
        """Finish the batches at hand, then leave."""
        for line in self._lines:
            line.stop()

    async def run(self) -> None:
        """Until told to stop; raises Halt where an operator has to decide."""
        progress = asyncio.create_task(self._report_progress())
        lines: list[asyncio.Task[None]] = []
        try:
            await self._start()
            lines += [asyncio.create_task(line.run()) for line in self._lines]
            await asyncio.gather(*lines)
        finally:
            # Where one cannot go on, the others are cut off: whoever starts next repairs it.
            for task in (progress, *lines):
                task.cancel()
            await asyncio.wait([progress, *lines])
            await self._close()

    async def _start(self) -> None:
        missing = await asyncio.to_thread(self._cluster.missing, self._settings.topics)
        if missing:
            raise SetupError(f"{self._settings.source}: topic {', '.join(sorted(missing))} does not exist; create it")
        letters = {topic for name in self._settings.topics if (topic := self._settings.dead_letter_topic(name))}
        missing = await asyncio.to_thread(self._cluster.missing, letters)
        if missing:
            raise SetupError(
                f"{self._settings.source}: failure.dead_letter_topic: {', '.join(sorted(missing))} does not exist; "
                'create it, or set it to "" to keep failed messages in the inbox only'
            )
        self._source.start()
        await asyncio.gather(*(line.open() for line in self._lines))
        self._readiness.clear("starting")
        log.info("started", consumer=self._settings.consumer, topics=self._settings.topics, pid=os.getpid())

    async def _close(self) -> None:
        self._readiness.close()
        await self._source.close()
        await asyncio.gather(*(line.close() for line in self._lines))
        await asyncio.to_thread(self._cluster.close)

    async def _report_progress(self) -> None:
        reported = 0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            if self._counts.records > reported:
                reported = self._counts.records
                log.info("progress", **asdict(self._counts))
