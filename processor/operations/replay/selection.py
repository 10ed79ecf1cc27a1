"""Which records of its ranges a replay is about; the others are passed over."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from processor.operations.replay.plan import Mode, Plan

if TYPE_CHECKING:
    from processor.messages.batch import Batch
    from processor.messages.message import Partition
    from processor.messages.record import Record
    from processor.settings.schema import Settings


class Selection:
    def __init__(self, settings: Settings, plan: Plan) -> None:
        self._wanted = plan.wanted
        self._scoped = settings.message.scope_by_type
        self._windowed = settings.message.window_seconds is not None
        self._mode = plan.mode
        self._applied_below: Mapping[Partition, int] = {one.partition: one.applied_below for one in plan.ranges}

    def apply(self, batch: Batch) -> None:
        """Mark the records that are not wanted."""
        emits = self._mode is Mode.RE_EMIT
        if not (self._wanted or emits) and batch.columns is not None and batch.columns.message_type.in_inbox:
            return
        for record in batch.as_rows():
            if not self._takes(record):
                record.not_ours, record.failure = True, None
            if emits:
                record.in_inbox = False  # no row of it is to be touched, whatever becomes of it

    def _takes(self, record: Record) -> bool:
        if not record.in_inbox and not self._takes_without_trace(record):
            return False
        wanted, message = self._wanted, record.message
        return (
            (not wanted.keys or message.key in wanted.keys)
            and (not wanted.types or message.type in wanted.types)
            and (not wanted.ids or not self._names(record).isdisjoint(wanted.ids))
        )

    def _takes_without_trace(self, record: Record) -> bool:
        """Types without inbox leave no trace: where the service has been they count as done, elsewhere as not done."""
        match self._mode:
            case Mode.MISSING:
                return False
            case Mode.RE_EMIT:
                return record.message.offset < self._applied_below[record.partition]
            case _:
                return True

    def _names(self, record: Record) -> set[str]:
        """Its id in the inbox, and what is left of that without type and window."""
        id_, type_ = record.message.id, record.message.type
        names = {id_}
        if self._scoped:
            names.add(id_.removeprefix(f"{type_ or ''}:"))
        if self._windowed:
            names |= {name.rpartition("@")[0] for name in names}
        return names
