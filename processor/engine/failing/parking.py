"""The policy `park-key`: which keys of our partitions wait behind a failed message."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from processor.postgres import parked_keys

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition, Partitions
    from processor.messages.batch import Batch
    from processor.messages.record import Record
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings


class Parking:
    def __init__(self, settings: Settings, partitions: Partitions) -> None:
        self.parks = settings.failure.policy == "park-key"
        self._partitions = partitions

    async def load(self, connection: Connection, owned: Sequence[OwnedPartition]) -> None:
        """Load the parked keys of these partitions: they keep waiting even if the policy has changed since."""
        parked = await parked_keys.load(connection, [one.partition_id for one in owned])
        for one in owned:
            one.parked_keys = parked[one.partition_id]

    async def sort_out(self, connection: Connection, batch: Batch) -> None:
        """Mark the records that have to wait."""
        parked = {
            partition: self._partitions.of(reading).parked_keys for partition, reading in batch.readings().items()
        }
        await parked_keys.sort_out(connection, batch, parked, park=self.parks)

    def remember(self, undone: Iterable[Record]) -> None:
        """Park the keys of records that have failed or wait, after their commit: later messages of these keys wait."""
        for record in undone:
            key = record.message.key
            if key is not None and (self.parks or record.parked):
                self._partitions.of(record.reading).parked_keys.add(parked_keys.digest(key))
