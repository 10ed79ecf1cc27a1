"""What an engine works on, and what is special about that: the live service's partitions for ever, or a bounded replay.

The protocol is the same for both, and so is its recovery. A job only says under which name the work is on record, how
its partitions come, and what is done to a batch besides; the steps and their order stay the loop's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from processor.kafka.membership import Membership
from processor.postgres.claims import Claiming

if TYPE_CHECKING:
    from collections.abc import Callable

    from processor.engine.failing.conclude import Ends
    from processor.engine.partitions import OwnedPartition
    from processor.handling.result import BatchResult
    from processor.kafka.fixed import FixedAssignment
    from processor.kafka.reader import PartitionReader
    from processor.messages.batch import Batch
    from processor.messages.message import Partition
    from processor.postgres.claims import Claims
    from processor.postgres.recall import Recall
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings


class Job:
    """The live service. A replay overrides what is different about it."""

    # Whether a message's rows are committed with its outputs. If not, what handlers write is taken back before that.
    keeps_rows = True
    # Whether its work has an end, and one process at a time that does it.
    bounded = False

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.name = settings.consumer  # of its ledger rows, its offsets in Kafka and its transactional ids
        self.scope = settings.consumer  # of its messages' keys in the inbox

    def membership(self, reader: PartitionReader) -> Membership | FixedAssignment:
        """Return how partitions come to it, and what proves to the broker that they are its own."""
        return Membership(self.settings, reader)

    def claiming(self, key_of: Callable[[str], bytes], owner: str) -> Claiming | Recall:
        message = self.settings.message
        return Claiming(key_of, message.on_collision, owner, self.settings.retention.grain)

    def inbox_id(self, _partition: Partition, ledger_id: int) -> int:
        """Return a partition's number in the inbox; `ledger_id` is that of its ledger row."""
        return ledger_id

    @property
    def waits(self) -> bool:
        """Whether `turn` would wait now."""
        return False

    async def turn(self) -> None:
        """Wait until the next batch may be taken."""

    def stop(self) -> None:
        """End the waiting: no further batch will be taken."""

    def select(self, batch: Batch) -> None:
        """Mark the records that are not to be processed."""

    def adapt(self, result: BatchResult) -> None:
        """Change the outputs of a batch before they are stored."""

    async def count(
        self,
        connection: Connection,
        batch: Batch,
        shares: Sequence[OwnedPartition],
        claims: Claims,
        ends: Ends,
        result: BatchResult,
    ) -> None:
        """Keep what a batch has come to, in its transaction; raise Fenced if the job was ended meanwhile."""
