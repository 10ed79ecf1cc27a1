"""Publishes batches that Postgres has committed and Kafka has not: in order, several together under a backlog.

A Kafka transaction costs the brokers about as much as two thousand records do, whatever it contains. So if the next
batch is ready already, a committed batch waits a moment for it. A waiting batch is safe: its outputs are stored, and
recovery sends those that Kafka does not have. A batch that none follows is published at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from processor.errors import BatchAborted, ProcessorError
from processor.kafka.producer import Offset
from processor.messages import positions
from processor.observe.events import PublicationFailed

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.kafka.producer import TransactionalProducer
    from processor.messages.outputs import EncodedOutputs
    from processor.observe.events import Emit
    from processor.postgres.ledger import Advance
    from processor.settings.schema import BatchSettings

# The most batches that share a transaction; during the transaction as many more may be committed.
TOGETHER = 4
# Readers do not wait longer than this for finished outputs, however long a batch may linger for records.
LONGEST_HOLD_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class CommittedBatch:
    """A batch that Postgres has committed."""

    shares: dict[OwnedPartition, Advance]
    outputs: Sequence[EncodedOutputs]

    @property
    def size(self) -> int:
        return sum(len(share.outputs) for share in self.shares.values() if share.outputs is not None)


class PublishQueue:
    """Publishes batches in their order. `room` and `finish` raise what goes wrong."""

    def __init__(
        self,
        settings: BatchSettings,
        partitions: Partitions,
        producer: TransactionalProducer,
        notify: Callable[[], None],
        emit: Emit,
    ) -> None:
        self._max_bytes = settings.max_bytes
        self._hold_seconds = min(LONGEST_HOLD_SECONDS, settings.linger_ms / 1000)
        self._partitions = partitions
        self._producer = producer
        self._notify = notify  # called after each transaction, whether it succeeded or not
        self._emit = emit
        self._waiting: list[CommittedBatch] = []
        self._sending: list[CommittedBatch] = []
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._hurried = False
        self._failure: ProcessorError | None = None
        self._unsent: set[OwnedPartition] = set()  # partitions of the batches that the failure left unpublished
        self._moved = asyncio.Event()

    @property
    def idle(self) -> bool:
        """Whether no batch is waiting or being sent, or none can be because of a failure."""
        return self._failure is not None or (self._task is None and not self._waiting)

    def add(self, batch: CommittedBatch, *, more: bool) -> None:
        """Publish a batch; if `more` are coming, together with those that follow within a moment."""
        self._partitions.use(batch.shares)
        self._waiting.append(batch)
        if not more or self._enough(self._waiting):
            self.hurry()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._hold_seconds, self.hurry)

    def hurry(self) -> None:
        """Publish now what is waiting, without waiting for more batches."""
        self._stop_timer()
        self._hurried = bool(self._waiting)
        if self._hurried and self._task is None and self._failure is None:
            self._task = asyncio.create_task(self._send())

    async def room(self) -> None:
        """Wait until another batch may be committed: the work that only Postgres has is bounded."""
        self.raise_failure()
        while self._waiting and self._enough([*self._sending, *self._waiting], TOGETHER + TOGETHER):
            await self._next()

    async def finish(self) -> None:
        """Wait until Kafka has every committed batch."""
        self.raise_failure()
        while not self.idle:
            await self._next()

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def abandon(self) -> set[OwnedPartition]:
        """Leave unpublished batches to recovery; return their partitions."""
        left = self._unsent.union(*(batch.shares for batch in self._waiting))
        self.close()
        if self._task is not None:
            await asyncio.wait({self._task})
            left |= self._unsent
        self._failure, self._unsent = None, set()
        return left

    def close(self) -> None:
        """Begin no other transaction."""
        self._stop_timer()
        self._release(self._waiting)
        self._waiting = []
        self._hurried = False

    async def _next(self) -> None:
        self.hurry()
        self._moved.clear()
        await self._moved.wait()
        self.raise_failure()

    def _enough(self, batches: Sequence[CommittedBatch], most: int = TOGETHER) -> bool:
        return len(batches) >= most or sum(batch.size for batch in batches) >= self._max_bytes * most // TOGETHER

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _send(self) -> None:
        try:
            while self._waiting and (self._hurried or self._enough(self._waiting)):
                self._stop_timer()
                self._hurried = False
                self._sending, self._waiting = self._waiting, []
                await self._publish(self._sending)
                self._done()
        except ProcessorError as error:
            self._fail(error)
        except Exception as error:  # a bug of ours; the outputs are stored, and recovery tries to send them
            self._emit(PublicationFailed(error))
            self._fail(BatchAborted(f"publishing failed: {type(error).__name__}: {error}"))
        finally:
            self._task = None
            self._done()

    def _fail(self, error: ProcessorError) -> None:
        self._failure = error
        self._unsent.update(*(batch.shares for batch in self._sending))

    def _done(self) -> None:
        self._release(self._sending)
        self._sending = []
        self._moved.set()
        self._notify()

    async def _publish(self, batches: Sequence[CommittedBatch]) -> None:
        ends = {partition: share for batch in batches for partition, share in batch.shares.items()}
        offsets = [
            Offset(share.partition, share.next_offset, positions.metadata(share.epoch))
            for partition, share in ends.items()
            if share.next_offset >= partition.silent_below
        ]
        outputs = [encoded for batch in batches for encoded in batch.outputs]
        if offsets or outputs:
            await self._producer.publish(outputs, offsets, still_owned(ends))
        for partition, share in ends.items():
            partition.published = share.next_offset

    def _release(self, batches: Iterable[CommittedBatch]) -> None:
        for batch in batches:
            self._partitions.release(batch.shares)


def still_owned(partitions: Iterable[OwnedPartition]) -> Callable[[], bool]:
    held = list(partitions)
    return lambda: all(partition.owned for partition in held)
