"""A replay as the engine sees it: partitions with an end, a name of its own in the ledger, the live service's inbox.

Everything that makes the live service exactly once makes a replay so: its ledger rows and its offsets are moved in the
same two transactions, and recovery brings them in step in the same way. What is different is here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from processor.engine.job import Job
from processor.errors import Fenced
from processor.kafka.fixed import FixedAssignment
from processor.messages import identity
from processor.messages.outputs import DEAD_LETTER, REPLAY, message_id
from processor.operations.replay.plan import Mode, Plan, ledger_name
from processor.operations.replay.selection import Selection
from processor.postgres import replays
from processor.postgres.recall import Recall
from processor.postgres.repeats import ClaimingRepeats
from processor.postgres.replays import Counted

if TYPE_CHECKING:
    from processor.engine.failing.conclude import Ends
    from processor.engine.partitions import OwnedPartition
    from processor.handling.result import BatchResult
    from processor.kafka.reader import PartitionReader
    from processor.messages.batch import Batch
    from processor.messages.message import Partition
    from processor.messages.outputs import EncodedOutputs
    from processor.operations.replay.pace import Pace
    from processor.postgres.claims import Claiming, Claims
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings


class ReplayJob(Job):
    bounded = True

    def __init__(self, settings: Settings, plan: Plan, pace: Pace, forgotten_below: Mapping[Partition, int]) -> None:
        super().__init__(_adapted(settings, plan, pace))
        self.keeps_rows = plan.mode is not Mode.RE_EMIT
        self._forgotten_below = forgotten_below
        self.name = ledger_name(plan.consumer, plan.name)
        self.scope = plan.consumer if plan.scope is None else f"{plan.consumer}/{plan.scope}"
        self._plan = plan
        self._pace = pace
        self._ranges = {one.partition: one for one in plan.ranges}
        self._live_key_of = identity.inbox_key(plan.consumer)
        self._selection = Selection(settings, plan)
        self._header = ((REPLAY, plan.name.encode()),)

    def membership(self, reader: PartitionReader) -> FixedAssignment:
        ends = {partition: one.end for partition, one in self._ranges.items()}
        return FixedAssignment(self.settings.kafka, self.name, reader, ends)

    def inbox_id(self, partition: Partition, ledger_id: int) -> int:
        """What is done in the live service's scope is on record at its coordinates."""
        return ledger_id if self._plan.mode is Mode.RE_APPLY else self._ranges[partition].live_id

    def claiming(self, key_of: Callable[[str], bytes], owner: str) -> Claiming | Recall:
        if self._plan.mode is Mode.RE_EMIT:
            return Recall(key_of, self._forgotten_below)
        return ClaimingRepeats(key_of, self.settings.message.on_collision, owner)

    @property
    def waits(self) -> bool:
        return self._pace.waits

    async def turn(self) -> None:
        await self._pace.turn()

    def stop(self) -> None:
        self._pace.stop()

    def select(self, batch: Batch) -> None:
        self._pace.took(len(batch))
        self._selection.apply(batch)

    def adapt(self, result: BatchResult) -> None:
        if not self._plan.outputs:
            result.outgoing.clear()
        for partition, encoded in list(result.outgoing.items()):
            loud = self._loud(partition, encoded)
            if self._plan.output_topic is not None:
                loud.topics = [self._plan.output_topic] * len(loud)
            if self._plan.scope is not None:
                loud.ids = [
                    None if place == DEAD_LETTER else message_id(self._live_key_of(cause), place)
                    for cause, place in zip(loud.causes, loud.places, strict=True)
                ]
            loud.extras = [(*(extra or ()), *self._header) for extra in loud.extras]
            result.outgoing[partition] = loud

    async def count(
        self,
        connection: Connection,
        batch: Batch,
        shares: Sequence[OwnedPartition],
        claims: Claims,
        ends: Ends,
        result: BatchResult,
    ) -> None:
        sizes, mine = batch.sizes(), Counter[object]()
        for partition, start, end in batch.stretches():
            mine[partition] += bisect_left(claims.mine, end) - bisect_left(claims.mine, start)
        failed = Counter(record.partition for record in ends.failed)
        undone = Counter(record.partition for record in ends.undone)
        unfinished = await replays.count(
            connection,
            self._plan.consumer,
            self._plan.name,
            [
                Counted(
                    one.ledger_id,
                    mine[one.partition] - undone[one.partition],
                    sizes[one.partition] - mine[one.partition] + undone[one.partition] - failed[one.partition],
                    failed[one.partition],
                    len(result.outgoing.get(one.partition, ())),
                )
                for one in shares
            ],
        )
        if not unfinished:
            raise Fenced(f"the replay {self._plan.name} was cancelled")

    def _loud(self, partition: Partition, encoded: EncodedOutputs) -> EncodedOutputs:
        """A copy without the outputs that Kafka has already."""
        silent = self._ranges[partition].silent if self._plan.mode is Mode.MISSING else range(0)
        return encoded.only([index for index, offset in enumerate(encoded.offsets) if offset not in silent])


def _adapted(settings: Settings, plan: Plan, pace: Pace) -> Settings:
    """The settings of the live service, with those changed that are for it alone."""
    failure: dict[str, str] = {}
    if plan.mode is not Mode.MISSING:
        failure |= {"policy": "dead-letter", "dead_letter_topic": ""}  # the failure is not one of the live service
    elif settings.failure.policy == "park-key":
        failure["policy"] = "dead-letter"  # the live service would not hear of another parked key
    return settings.model_copy(
        update={
            "failure": settings.failure.model_copy(update=failure),
            "run": settings.run.model_copy(update={"ready_file": None}),
            "batch": settings.batch.model_copy(
                update={"max_messages": pace.largest_batch(settings.batch.max_messages)}
            ),
        }
    )
