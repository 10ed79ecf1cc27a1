"""What an audit finds: how many records of each kind, and the offenders by name."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

# Kind of finding: what it means.
MEANING = {
    "lost_row": "the ledger is past this record, and the inbox has no row of it",
    "offset_past_record": "the committed offset is past this record, the ledger is not, and the inbox has no row of it",
    "offset_beyond_log": "the committed offset lies behind the end of the log",
    "unfinished": "the committed offset is past this record, and its row says that it is still to be done",
    "collision_without_row": "the id belongs to another payload, and this message has no row of its own",
    "payload_differs": "the row of this record was made for another payload",
    "other_topic": "the ledger knows another topic of this name",
    "doubled_output": "an output with this id was there before",
    "orphan_output": "nothing that was completed has caused this output",
    "missing_output": "a later output of the same message is there, and this one is not",
    "unsent_outputs": "stored in Postgres, not in Kafka, and nobody is sending them",
}


class Finding(NamedTuple):
    """One offender."""

    kind: str
    topic: str
    partition: int
    offset: int | None
    id: str | None
    why: str


@dataclass(slots=True)
class Findings:
    """All of them counted, the first ones kept."""

    limit: int
    counts: Counter[str] = field(default_factory=Counter)
    shown: list[Finding] = field(default_factory=list)

    def add(self, finding: Finding) -> None:
        self.counts[finding.kind] += 1
        if len(self.shown) < self.limit:
            self.shown.append(finding)

    @property
    def total(self) -> int:
        return self.counts.total()
