"""Decides before the commit how a batch ends: which records failed, which wait, and which dead letters are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from typing import TYPE_CHECKING

from processor.engine.failing.outcomes import Cut, Exhausted, Stop, Wait
from processor.handling.result import max_output
from processor.messages import letters
from processor.messages.outputs import EncodedOutputs

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.handling.result import BatchResult
    from processor.kafka.cluster import Cluster
    from processor.messages.batch import Batch
    from processor.messages.record import Record
    from processor.postgres.claims import Claims
    from processor.settings.schema import Settings


@dataclass(frozen=True, slots=True)
class Ends:
    """The records that do not end as completed."""

    failed: Sequence[Record] = ()
    parked: Sequence[Record] = ()

    @property
    def undone(self) -> list[Record]:
        return [*self.failed, *self.parked]


class Conclusion:
    def __init__(
        self,
        settings: Settings,
        partitions: Partitions,
        cluster: Cluster,
        adapt: Callable[[BatchResult], None],
    ) -> None:
        self._settings = settings
        self._partitions = partitions
        self._cluster = cluster
        self._adapt = adapt  # changes the outputs before it is asked whether their topics exist
        self._halts = settings.failure.policy == "halt"
        self._version = version("kafka-postgres-processor")
        self._max_output = max_output(settings)

    async def conclude(self, batch: Batch, claims: Claims, result: BatchResult) -> Ends | Stop | Exhausted | Cut | Wait:
        """Return the ends of a batch that may be committed, or why it may not. Dead letters join the outputs."""
        ends = _ends(batch, claims)
        if ends.failed and self._halts:
            return Stop(ends.failed[0])
        if (exhausted := self._exhausted(batch, ends.failed)) is not None:
            return exhausted
        self._write_letters(result, ends.failed)
        self._adapt(result)
        return await self._without_topic(batch, result) or ends

    def count(self, batch: Batch, ends: Ends) -> None:
        """Count the failures of a committed batch against the budgets."""
        if ends.failed:
            for owned, outcomes in self._outcomes(batch, ends.failed).items():
                owned.budget.count(outcomes)
        else:
            sizes = batch.sizes()
            for partition, reading in batch.readings().items():
                self._partitions.of(reading).budget.count([False] * sizes[partition])

    def _exhausted(self, batch: Batch, failed: Sequence[Record]) -> Exhausted | None:
        if failed:
            outcomes = self._outcomes(batch, failed)
            for owned in {self._partitions.of(record.reading): None for record in failed}:
                if (reason := owned.budget.exceeded(outcomes.get(owned, ()))) is not None:
                    return Exhausted(owned, reason)
        return None

    def _outcomes(self, batch: Batch, failed: Collection[Record]) -> dict[OwnedPartition, list[bool]]:
        """Return for each partition which records failed, without redriven ones: they counted the first time."""
        failed = set(failed)
        outcomes: dict[OwnedPartition, list[bool]] = {}
        for record in batch.as_rows():
            if not record.redriven:
                outcomes.setdefault(self._partitions.of(record.reading), []).append(record in failed)
        return outcomes

    def _write_letters(self, result: BatchResult, failed: Sequence[Record]) -> None:
        """Add dead letters to the outputs: like any output, they are sent with the offset or not at all.

        A message that fails again in a way that a letter has already reported gets none.
        """
        now = datetime.now(UTC)
        for record in failed:
            assert record.failure is not None
            if record.failure.way in record.failed_as:
                continue
            topic = self._settings.dead_letter_topic(record.message.topic)
            silent_below = self._partitions.of(record.reading).silent_below
            if topic is not None and record.message.offset >= silent_below:
                letter = letters.letter(record, topic, self._settings.consumer, self._version, now, self._max_output)
                result.add(record.partition, EncodedOutputs.of([letter]))
        for partition in {record.partition for record in failed}:
            result.sort(partition)

    async def _without_topic(self, batch: Batch, result: BatchResult) -> Cut | Wait | None:
        """Return Cut or Wait if an output's topic does not exist: the deployment is at fault, not the message.

        The partition waits, from that message on, until the topic exists; the records before it are committed first.
        """
        topics = result.topics
        if self._cluster.knows(topics):
            return None
        missing = await asyncio.to_thread(self._cluster.missing, topics)
        if not missing:
            return None
        senders = result.sent_to(missing)
        for index, record in enumerate(batch.as_rows()):
            if topic := senders.get((record.partition, record.message.offset)):
                if index:
                    return Cut(index)
                return Wait(
                    f"{record.coordinates} ({record.message.id}): {record.handler} sends to {topic}, "
                    "a topic that does not exist; create it",
                    [self._partitions.of(record.reading)],
                )
        return None


def _ends(batch: Batch, claims: Claims) -> Ends:
    rows = batch.rows
    if not rows:
        return Ends()
    undone = [record for record in map(rows.__getitem__, claims.mine) if record.failure is not None or record.parked]
    return Ends([one for one in undone if not one.parked], [one for one in undone if one.parked])
