"""Which offsets an audit reads: of the input what is committed, of the outputs what committed readers see."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

from processor.errors import BatchAborted, SetupError
from processor.kafka.cluster import Cluster
from processor.kafka.extents import Extent, Extents
from processor.messages.message import Partition
from processor.operations.verify.findings import Finding
from processor.postgres import audit

if TYPE_CHECKING:
    from processor.messages.positions import CommittedOffset
    from processor.postgres.audit import LedgerEntry
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings


@dataclass(frozen=True, slots=True)
class Wanted:
    """What somebody wants audited; by default everything."""

    topic: str | None = None
    partition: int | None = None
    from_offset: int | None = None
    to_offset: int | None = None
    since: datetime | None = None
    until: datetime | None = None
    times: tuple[str | None, str | None] = (
        None,
        None,
    )  # those two as somebody wrote them: `2h` moves on with the clock
    output_topics: tuple[str, ...] = ()  # besides those that the handlers declare
    sole_writer: bool = False  # nobody else writes to the output topics

    @property
    def everything(self) -> bool:
        bounds = (self.topic, self.partition, self.from_offset, self.to_offset, self.since, self.until)
        return all(bound is None for bound in bounds)


@dataclass(slots=True)
class Span:
    """Offsets of one partition, and how far they are read."""

    topic: str
    partition: int
    topic_id: str
    start: int
    end: int
    position: int
    is_input: bool
    expired: int = 0  # offsets that the log lost before they were read
    partition_id: int = -1  # of an input's partition in the inbox
    applied: int = 0  # below it the ledger says that everything is applied
    first_ms: int | None = None  # the timestamp of the first record that was read

    @property
    def at(self) -> Partition:
        return Partition(self.topic, self.partition)


@dataclass(slots=True)
class Plan:
    spans: list[Span] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what cannot be judged, and why
    all_of_input: bool = True  # nothing that was ever processed is missing from what is read
    gaps_judged: bool = True
    outputs_from_ms: int = 0  # an output that is older may have expired, as far as is known before reading

    def begins_ms(self) -> int:
        """Since when no output can have expired: each log still has what was there, or a record that is older."""
        cut = (span for span in self.spans if not span.is_input and (span.start > 0 or span.expired))
        return max([self.outputs_from_ms, *(span.first_ms for span in cut if span.first_ms is not None)])


async def make(db: Connection, settings: Settings, wanted: Wanted) -> Plan:
    plan = Plan()
    inputs = _chosen_topics(settings, wanted)
    outputs = sorted({topic for handler in settings.handlers.values() for topic in handler.outputs})
    outputs = sorted({*outputs, *wanted.output_topics})
    extents = Extents(settings.kafka)
    # First the outputs: what is visible now was caused by records below the offset that is asked for later.
    of_outputs = await asyncio.to_thread(extents.of, outputs)
    of_inputs = await asyncio.to_thread(extents.of, inputs)
    group = await asyncio.to_thread(committed, settings, list(of_inputs))
    ledger = await audit.ledger(db, settings.consumer, inputs)
    times = await asyncio.to_thread(_at_times, extents, wanted, [*of_inputs, *of_outputs])
    plan.all_of_input = wanted.everything and not await asyncio.to_thread(extents.may_lose, inputs)
    begun = [at for at in of_inputs if at in ledger or group.get(at) is not None]
    chosen = [at for at in begun if wanted.partition in (None, at.number)]
    if not chosen:
        of = ", ".join(inputs) if wanted.partition is None else f"partition {wanted.partition} of {', '.join(inputs)}"
        raise SetupError(f"{settings.consumer} has processed nothing of {of}")
    for at in chosen:
        _plan_input(plan, at, of_inputs[at], ledger.get(at), group.get(at), wanted, times)
    for at, extent in of_outputs.items():
        start = max(extent.start, times[0].get(at, extent.start))
        if start < extent.end:
            plan.spans.append(Span(*at, extent.topic_id, int(start), extent.end, int(start), is_input=False))
        elif start > 0:
            plan.outputs_from_ms = int(time.time() * 1000)  # all that was here has expired
    _plan_gaps(plan, outputs, await asyncio.to_thread(extents.may_lose, outputs))
    return plan


def _plan_gaps(plan: Plan, outputs: Sequence[str], compacted: Sequence[str]) -> None:
    if not outputs:
        plan.notes.append("no output topic is known: declare `outputs` in [handlers], or name them with --output-topic")
    if compacted:
        plan.gaps_judged = False
        plan.notes.append(f"missing outputs are not looked for: {', '.join(compacted)} may be compacted")


def _chosen_topics(settings: Settings, wanted: Wanted) -> list[str]:
    if wanted.topic is None:
        return sorted(settings.topics)
    if wanted.topic not in settings.topics:
        raise SetupError(f"{settings.consumer} does not read {wanted.topic}; it reads {', '.join(settings.topics)}")
    return [wanted.topic]


def committed(settings: Settings, partitions: list[Partition]) -> dict[Partition, CommittedOffset | None]:
    cluster = Cluster(settings.kafka, settings.consumer)
    try:
        found, unknown = cluster.committed(partitions)
    finally:
        cluster.close()
    if unknown:
        raise BatchAborted("; ".join(unknown.values()))
    return found


def _at_times(extents: Extents, wanted: Wanted, partitions: list[Partition]) -> tuple[dict[Partition, Any], ...]:
    """Where each partition reaches the times that bound the audit; infinity if it has not reached one yet."""

    def reached(at: datetime | None) -> dict[Partition, Any]:
        if at is None:
            return {}
        found = extents.at_time(partitions, int(at.timestamp() * 1000))
        return {partition: float("inf") if offset is None else offset for partition, offset in found.items()}

    return reached(wanted.since), reached(wanted.until)


def _plan_input(
    plan: Plan,
    at: Partition,
    extent: Extent,
    ledger: LedgerEntry | None,
    committed: CommittedOffset | None,
    wanted: Wanted,
    times: tuple[dict[Partition, Any], ...],
) -> None:
    if ledger is not None and ledger.topic_id != extent.topic_id:
        why = f"it has the id {ledger.topic_id}, the topic is {extent.topic_id} now: see `processor topic-recreated`"
        plan.findings.append(Finding("other_topic", *at, None, None, why))
        plan.all_of_input = False
        return
    if committed is not None:
        end = committed.offset
    else:
        assert ledger is not None
        end = ledger.first_offset  # the group has forgotten its offset; below this, all was known to be published
    if end > extent.end:
        why = f"{end} is committed, and the log ends at {extent.end}: was it truncated, or the topic created anew?"
        plan.findings.append(Finding("offset_beyond_log", *at, end, None, why))
    since, until = times
    start = max(extent.start, wanted.from_offset or 0, since.get(at, 0))
    end = min(end, extent.end, until.get(at, end), end if wanted.to_offset is None else wanted.to_offset)
    plan.all_of_input = plan.all_of_input and extent.start == 0 and not (ledger is not None and ledger.recreated)
    if start < end:
        span = Span(*at, extent.topic_id, start, end, start, is_input=True)
        if ledger is not None:
            span.partition_id, span.applied = ledger.partition_id, ledger.next_offset
        plan.spans.append(span)
