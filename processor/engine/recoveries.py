"""The current recoveries, which run beside the work on other partitions; and the one way back from trouble.

Trouble with a partition starts over that partition and no other: it reads from Postgres and Kafka what was committed,
brings the two in step, and goes on from there. It never infers this from how an attempt looked in this process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from processor.engine.failing import classify
from processor.engine.partitions import Obstacle
from processor.errors import BatchAborted, ConnectionLost, Fenced
from processor.observe.events import RecoveryRetried, StartingOver

if TYPE_CHECKING:
    from processor.engine.failing.pauses import PartitionPauses
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.engine.takeover import Takeover
    from processor.observe.events import Emit
    from processor.observe.readiness import Readiness

# After these errors the engine has to look up what was committed. Any other error is a failing message, or a bug.
Trouble = (BatchAborted, Fenced, ConnectionLost)


class Recoveries:
    def __init__(
        self,
        partitions: Partitions,
        takeover: Takeover,
        pauses: PartitionPauses,
        readiness: Readiness,
        notify: Callable[[], None],
        emit: Emit,
    ) -> None:
        self._partitions = partitions
        self._takeover = takeover
        self._pauses = pauses
        self._readiness = readiness
        self._notify = notify  # called when a recovery has ended
        self._emit = emit
        self._under_way: set[asyncio.Task[None]] = set()
        self._stopping = False

    def begin_new(self) -> None:
        """Recover newly assigned partitions, and raise the errors of recoveries that have ended."""
        for task in [task for task in self._under_way if task.done()]:
            self._under_way.discard(task)
            task.result()
        new = self._partitions.take_new()
        if new:
            self._begin(new)

    def start_over(self, trouble: Exception, affected: Collection[OwnedPartition]) -> list[OwnedPartition]:
        """Recover the affected partitions, all of them if none is named; return those whose recovery began."""
        candidates = (*self._partitions.active(), *self._pauses.owned())
        chosen = [one for one in candidates if not one.recovering and (one in affected or not affected)]
        names = [str(partition.partition) for partition in chosen]
        self._emit(StartingOver(str(trouble), type(trouble).__name__, names))
        self._partitions.suspend(chosen)
        if chosen:  # otherwise they belong to another instance, or are being recovered
            self._begin(chosen, str(trouble))
        return chosen

    def stop(self) -> None:
        """Let current tries end, and begin no others."""
        self._stopping = True

    def cancel(self) -> list[asyncio.Task[None]]:
        for task in self._under_way:
            task.cancel()
        return list(self._under_way)

    def _begin(self, partitions: list[OwnedPartition], reason: str | None = None) -> None:
        for partition in partitions:
            partition.recovering = True
        task = asyncio.create_task(self._recover(partitions, reason))
        task.add_done_callback(lambda _: self._notify())
        self._under_way.add(task)

    @staticmethod
    def _keep(partitions: list[OwnedPartition], left: Collection[OwnedPartition]) -> None:
        """Keep the partitions that are left in the list; the recovery of the others has ended."""
        for partition in set(partitions).difference(left):
            partition.recovering = False
            partition.clear(Obstacle.RECOVERING)
        partitions[:] = left

    async def _recover(self, partitions: list[OwnedPartition], reason: str | None) -> None:
        """Bring partitions in step and start reading them; retry those that fail until they succeed or are not ours.

        A partition leaves the list once it is recovered: later trouble with it begins another recovery.
        """
        tries = 0
        obstacle = object()
        if reason is not None:
            self._readiness.obstruct(obstacle, reason)
            for partition in partitions:
                partition.obstruct(Obstacle.RECOVERING, reason)
        try:
            while not self._stopping:
                self._keep(partitions, [partition for partition in partitions if not partition.leaving])
                if not partitions:
                    return
                try:
                    left = await self._takeover.recover(partitions, tries)
                except Trouble as trouble:
                    if any(partition.leaving for partition in partitions):
                        continue  # drop the one that leaves, and try the others at once
                    left = dict.fromkeys(partitions, str(trouble))
                self._keep(partitions, left)
                for partition, why in left.items():
                    partition.obstruct(Obstacle.RECOVERING, why)
                if left:
                    tries += 1
                    reason = "; ".join(dict.fromkeys(left.values()))
                    self._readiness.obstruct(obstacle, reason)
                    self._emit(RecoveryRetried(reason, tries, [str(partition.partition) for partition in left]))
                    await asyncio.sleep(classify.backoff(tries))
        finally:
            self._keep(partitions, ())
            self._readiness.clear(obstacle)
