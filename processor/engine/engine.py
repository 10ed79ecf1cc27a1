"""The engine of one process: how its parts start, and how they end."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING

from processor.engine import parts
from processor.engine.job import Job
from processor.engine.loop import Loop
from processor.errors import ProcessorError, SetupError
from processor.kafka.cluster import Cluster
from processor.kafka.reader import PartitionReader
from processor.messages.decode import Decoder
from processor.observe import logs, stalls
from processor.observe.counters import Counters
from processor.observe.events import Events, Started
from processor.observe.readiness import Readiness
from processor.observe.stalls import Stalls

if TYPE_CHECKING:
    from processor.handling.registry import Routes
    from processor.settings.schema import Settings

PROGRESS_SECONDS = 10.0


class Engine:
    def __init__(self, settings: Settings, routes: Routes, job: Job | None = None) -> None:
        job = Job(settings) if job is None else job
        self._job = job
        self._settings = settings
        self._counters = Counters()
        self._emit = Events(self._counters, logs.write)
        self.reader = PartitionReader(settings, Decoder(settings, routes.types, job.scope))
        self._cluster = Cluster(settings.kafka, job.name)
        self.readiness = Readiness(settings.run.ready_file)
        self._stalls = Stalls(settings.failure.timeout_ms / 1000, settings.run.stop_timeout_ms / 1000, self.readiness)
        self.membership = job.membership(self.reader)
        self.parts = parts.build(
            job,
            routes,
            self.reader,
            self.membership,
            self._cluster,
            self.readiness,
            self._stalls,
            self._emit,
        )
        self._loop = Loop(self.parts)

    def stop(self) -> None:
        """Finish the current batch, then leave."""
        self._loop.stop()

    async def run(self) -> None:
        """Run until `stop` is called or the job is done; raise Halt where an operator has to decide."""
        progress = asyncio.create_task(self._report_progress())
        self._stalls.start()
        with ExitStack() as bound:
            try:
                await self._start()
                await self._loop.run()
            except Exception as error:  # the end has a deadline here too, as it has after a signal
                code = error.exit_code if isinstance(error, ProcessorError) else 1
                bound.callback(stalls.exit_after(self._settings.run.stop_timeout_ms / 1000, code, str(error)))
                raise
            finally:
                progress.cancel()
                await asyncio.wait([progress])
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
        for type_, handler in self._settings.handlers.items():
            missing = await asyncio.to_thread(self._cluster.missing, handler.outputs)
            if missing:
                raise SetupError(
                    f"{self._settings.source}: handlers.{type_}.outputs: {', '.join(sorted(missing))} does not exist; "
                    "create it"
                )
        self.reader.start()
        if self._settings.kafka.static_membership and not self._job.bounded:
            self.membership.start(await self.parts.slot.lease())
        else:
            self.membership.start()
        await self._loop.open()
        self.readiness.clear("starting")
        self._emit(Started(self._job.name, self._settings.topics, os.getpid()))

    async def _close(self) -> None:
        self.readiness.close()
        await asyncio.to_thread(self.membership.close)
        await self.reader.close()
        await self.parts.close()
        await asyncio.to_thread(self._cluster.close)
        self._stalls.close()

    async def _report_progress(self) -> None:
        reported = 0
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            if self._counters.records > reported:
                reported = self._counters.records
                self._emit(self._counters.progress())
