"""Decides from a partition's two positions what happened to it, and how to bring them back in step. Pure.

L is the ledger row, K Kafka's committed offset. K is ours when its metadata names an epoch; an operator who moves
offsets with Kafka's own tools leaves other metadata. After the step that is decided here, K = L.next_offset and K is
ours, the stored outputs are sent, and work starts there.

Offsets have gaps (transaction markers, compaction), so positions are compared and records never counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from processor.errors import Halt
from processor.messages.message import Partition
from processor.messages.positions import CommittedOffset, Log
from processor.postgres.ledger import LedgerRow
from processor.postgres.retention import NOTHING_FORGOTTEN, Watermark


@dataclass(frozen=True, slots=True)
class Step:
    """How to bring one partition in step.

    Work begins at `start`. Stored outputs from `send_from` on are sent first, none if it is None; `commit` is the
    offset to commit with them, as ours. With `follow` instead, the committed offset stays where it is, at `start`; the
    ledger moves there, and only then the offset becomes ours. `create` makes the ledger's row. Outputs of records below
    `silent_below` are not sent again, and no offset below it is committed.
    """

    event: str
    start: int
    send_from: int | None = None
    commit: int | None = None
    follow: bool = False
    create: bool = False
    silent_below: int = 0


def decide(
    partition: Partition,
    ledger: LedgerRow | None,
    committed: CommittedOffset | None,
    log: Log,
    *,
    start: str,
    on_database_behind: str,
    met: int | None = None,
    forgotten: Watermark = NOTHING_FORGOTTEN,
) -> Step:
    """Decide what to do; raise Halt where continuing could lose or duplicate something.

    `met` is the number of partitions that the topic had when this consumer first read it, None if it never did.
    """
    if ledger is not None:
        same_topic(partition, ledger.topic_id, log.topic_id)
        if committed is not None and committed.epoch is not None and committed.epoch < ledger.first_epoch:
            committed = None  # it belongs to an earlier topic of the same name
    elif committed is None and met is not None and partition.number >= met:
        # The partition was added later: the consumer has to read all of it, wherever `start` made it begin elsewhere.
        return Step("partition_added", log.start, commit=log.start, create=True)
    if ledger is None:
        return _without_ledger(partition, committed, log, start, on_database_behind)
    unsent = ledger.first_offset if ledger.unsent else None
    if committed is None:
        _within(partition, "the ledger's position", ledger.next_offset, log)
        return Step("offsets_forgotten", ledger.next_offset, send_from=unsent, commit=ledger.next_offset)
    if committed.ours and committed.offset > ledger.next_offset:
        _within(partition, "the ledger's position", ledger.next_offset, log)
        return _database_behind(partition, ledger.next_offset, committed.offset, on_database_behind)
    if committed.ours and committed.offset == ledger.next_offset:
        _within(partition, "the committed offset", committed.offset, log)
        return Step("in_step", committed.offset)
    if committed.ours and committed.offset >= ledger.first_offset:
        # We died between the two commits. Sending the stored outputs is enough: no record is read again. Kafka has the
        # outputs of the batches below its offset.
        _within(partition, "the ledger's position", ledger.next_offset, log)
        missing = committed.offset if ledger.unsent else None
        return Step("died_between_commits", ledger.next_offset, send_from=missing, commit=ledger.next_offset)
    # An operator moved the offset, or (it is ours, but below what is known to be sent) Kafka lost commits: read from
    # there. Outputs that may never have been sent go first: it is better to repeat some, with their old ids, than to
    # lose some.
    _within(partition, "the committed offset", committed.offset, log)
    if committed.offset < ledger.next_offset:
        _remembered(partition, committed.offset, ledger.next_offset, forgotten)
    # The offset stays the operator's until the ledger has followed: otherwise a death in between would look like one
    # between the two commits.
    if unsent is not None and committed.sent is not None:
        unsent = max(unsent, committed.sent)
    moved = Step(
        "rewound" if committed.offset < ledger.next_offset else "skipped_ahead",
        committed.offset,
        send_from=unsent,
        follow=True,
    )
    return replace(moved, event="in_step") if committed.offset == ledger.next_offset else moved


def _without_ledger(
    partition: Partition, committed: CommittedOffset | None, log: Log, start: str, on_database_behind: str
) -> Step:
    if committed is None:
        if start == "fail":
            raise Halt(f"{partition}: no position is stored and kafka.start is fail; set it to earliest or latest")
        offset = log.start if start == "earliest" else log.end
        return Step("first_start", offset, commit=offset, create=True)
    _within(partition, "the committed offset", committed.offset, log)
    if committed.ours:
        step = _database_behind(partition, log.start, committed.offset, on_database_behind)
        return Step(step.event, step.start, create=True, silent_below=step.silent_below)
    return Step("offsets_adopted", committed.offset, create=True, follow=True)


def _database_behind(partition: Partition, behind: int, committed: int, on_database_behind: str) -> Step:
    if on_database_behind == "halt":
        raise Halt(
            f"{partition}: Kafka has committed offset {committed}, the database only {behind}: the database has lost "
            "commits (restored from a backup, or failed over to a stale standby?). Restore it, or set "
            "kafka.on_database_behind = 'reapply' to apply the difference again without sending its outputs twice"
        )
    return Step("reapplying", behind, silent_below=committed)


def same_topic(partition: Partition, known: str, now: str) -> None:
    if known != now:
        raise Halt(
            f"{partition}: the topic was deleted and created anew (id {known}, now {now}); its offsets now mean "
            "other records. To read the new topic from its beginning: `processor topic-recreated CONFIG`"
        )


def _remembered(partition: Partition, offset: int, next_offset: int, forgotten: Watermark) -> None:
    if not forgotten.allows(offset):
        end = min(forgotten.below, next_offset)
        raise Halt(
            f"{partition}: the committed offset was moved back to {offset}, and messages below {forgotten.below} are "
            f"forgotten (retention): those from {offset} to {end - 1} would be handled again as if they were new. Set "
            f"the offset to {forgotten.below} or above with kafka-consumer-groups --reset-offsets, or accept that: "
            "`processor accept-rewind CONFIG`"
        )


def _within(partition: Partition, what: str, offset: int, log: Log) -> None:
    if offset < log.start:
        raise Halt(
            f"{partition}: {what} is {offset}, the log now begins at {log.start}: records expired before they were "
            "read, or at best the markers of a transaction. Restore them, or accept the gap: "
            "kafka-consumer-groups --reset-offsets --to-earliest"
        )
    if offset > log.end:
        raise Halt(
            f"{partition}: {what} is {offset}, the log ends at {log.end}: it was truncated. Find out what the cluster "
            "lost, then set the offset with kafka-consumer-groups --reset-offsets"
        )
