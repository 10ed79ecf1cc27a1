"""The input's side of an audit: each record has its end in the inbox, or a reason to have none."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from processor.operations.verify.findings import Finding, Findings
from processor.operations.verify.identity import Identity, Kind, Raw, keys
from processor.operations.verify.questions import FORGOTTEN, WITHOUT_INBOX, Book, Question
from processor.postgres import audit
from processor.postgres.audit import Odd

if TYPE_CHECKING:
    from processor.messages.message import Partition
    from processor.operations.verify.plan import Span
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

# The checksum of a delete marker, which is another message than an empty value.
NO_VALUE = 1


class Entry(NamedTuple):
    """One record, as the inbox should know it."""

    offset: int
    id: str
    key: bytes
    hash: int
    kind: Kind


class Inputs:
    def __init__(
        self, settings: Settings, book: Book, counts: Counter[str], findings: Findings, below: Mapping[Partition, int]
    ) -> None:
        self._identity = Identity(settings)
        self._key = keys(settings.consumer)
        self._skips_collisions = settings.message.on_collision == "skip"
        self._book = book
        self._counts = counts
        self._findings = findings
        self._below = below  # rows of records at lower offsets may have been forgotten

    def read(self, raws: Sequence[Raw], span: Span) -> list[Entry]:
        """Name the records. Costs processor time alone."""
        name, key = self._identity.name, self._key
        prefix = f"{span.topic}:{span.topic_id}:{span.partition}:"
        entries = []
        for raw in raws:
            offset = raw.offset() or 0
            id_, kind = name(raw, f"{prefix}{offset}")
            entries.append(Entry(offset, id_, key(id_.encode()), checksum(raw.value()), kind))
        return entries

    async def judge(self, db: Connection, entries: list[Entry], span: Span) -> None:
        self._counts["records"] += len(entries)
        if not all(entry.kind is Kind.USUAL for entry in entries):
            for entry in entries:
                if entry.kind is Kind.WITHOUT_INBOX:
                    self._counts["without_inbox"] += 1
                    self._book.settle(entry.key, WITHOUT_INBOX)
                elif entry.kind is Kind.FOREIGN:
                    self._counts["for_another_consumer"] += 1
            entries = [entry for entry in entries if entry.kind in (Kind.USUAL, Kind.REDRIVEN)]
        odd = await _look_up(db, entries, span)
        self._counts["completed"] += len(entries) - len(odd)
        again = []  # those that may have a row under their own coordinates
        for one in odd:
            entry = entries[one.number]
            if one.status is None and entry.offset < self._below.get(span.at, 0):
                self._counts["forgotten"] += 1
                self._book.settle(entry.key, FORGOTTEN)
            elif one.status is None or not (one.same_payload or one.same_place):
                again.append((entry, one))
            elif not one.same_payload:
                self._find("payload_differs", entry, span, "somebody has changed the row, or the record")
            else:
                self._count(one, entry, span)
        if again:
            await self._look_again(db, again, span)

    async def _look_again(self, db: Connection, again: list[tuple[Entry, Odd]], span: Span) -> None:
        """A message whose id belongs to another payload has a row of its own, under its id and coordinates."""
        own = []
        for entry, _ in again:
            id_ = f"{entry.id}~{span.topic}:{span.topic_id}:{span.partition}:{entry.offset}"
            own.append(entry._replace(id=id_, key=self._key(id_.encode())))
        odd = {one.number: one for one in await _look_up(db, own, span)}
        for index, (entry, first) in enumerate(again):
            found = odd.get(index)
            if found is None:
                self._counts["completed"] += 1
            elif found.status is not None:
                self._count(found, entry, span)
            elif first.status is None:
                self._miss(entry, span)
            elif self._skips_collisions:
                self._counts["skipped_collision"] += 1
            elif entry.offset < self._below.get(span.at, 0):
                self._counts["forgotten"] += 1
            else:
                self._find("collision_without_row", entry, span, f"the row of its id is {first.status}")

    def _count(self, one: Odd, entry: Entry, span: Span) -> None:
        match one.status:
            case "completed" if one.same_place:
                self._counts["completed"] += 1
            case "completed":
                self._counts["redriven" if entry.kind is Kind.REDRIVEN else "duplicate"] += 1
            case "pending" | "processing" if one.failed_before:
                self._counts["in_retry"] += 1
            case "pending" | "processing":
                self._find("unfinished", entry, span, f"its row is {one.status}, and it never failed for good")
            case _:
                self._counts[str(one.status)] += 1

    def _miss(self, entry: Entry, span: Span) -> None:
        """No row; whether retention explains it shows when all has been read."""
        if span.partition_id < 0:
            kind, why = "offset_past_record", "the ledger has no row of this partition"
        elif entry.offset < span.applied:
            kind, why = "lost_row", f"the ledger stands at {span.applied}"
        else:
            kind, why = "offset_past_record", f"the ledger stands at {span.applied}"
        question = Question(entry.key.hex(), kind, *span.at, entry.offset, entry.id, why)
        self._book.ask(question)

    def _find(self, kind: str, entry: Entry, span: Span, why: str) -> None:
        self._findings.add(Finding(kind, *span.at, entry.offset, entry.id, why))


async def _look_up(db: Connection, entries: list[Entry], span: Span) -> list[Odd]:
    if not entries:
        return []
    return await audit.not_plainly_done(
        db,
        span.partition_id,
        [entry.key.hex() for entry in entries],
        [entry.offset for entry in entries],
        [entry.hash for entry in entries],
    )


def checksum(value: bytes | None) -> int:
    """Return CRC-32 as Postgres' integer holds it."""
    if value is None:
        return NO_VALUE
    found = zlib.crc32(value)
    return found - 2**32 if found >= 2**31 else found
