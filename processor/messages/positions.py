"""What the brokers know about a partition: the offset that the group has committed, and what the log holds."""

from __future__ import annotations

import re
from dataclasses import dataclass

_METADATA = re.compile(r"processor epoch=(\d+)(?: sent=(\d+))?\Z")


def metadata(epoch: int, sent: int | None = None) -> str:
    """Return the metadata that marks an offset as ours; with `sent`, as an operator's: see `CommittedOffset.sent`."""
    return f"processor epoch={epoch}" if sent is None else f"processor epoch={epoch} sent={sent}"


@dataclass(frozen=True, slots=True)
class CommittedOffset:
    """Kafka's committed offset, known to be stable."""

    offset: int
    metadata: str

    @property
    def epoch(self) -> int | None:
        """The epoch under which we committed it; None if somebody else did."""
        match = _METADATA.match(self.metadata)
        return int(match[1]) if match else None

    @property
    def sent(self) -> int | None:
        """The offset below which stored outputs were sent, if an operator moved this one and the ledger must follow."""
        match = _METADATA.match(self.metadata)
        return int(match[2]) if match and match[2] else None

    @property
    def ours(self) -> bool:
        return self.epoch is not None and self.sent is None


@dataclass(frozen=True, slots=True)
class Log:
    """What the broker holds of a partition now."""

    topic_id: str
    start: int
    end: int
    partitions: int = 1  # of the topic
