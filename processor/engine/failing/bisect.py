"""Splits a batch that fails as a whole until the message at fault is alone.

A batch is optimistic: one transaction for all records. If it fails and the message at fault is unknown, the first half
is tried, then half of the remaining suspects, and so on: one transaction for each halving. The records after the
suspects stay together, so that a single bad record among a thousand costs a dozen transactions, not a hundred.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from typing import TYPE_CHECKING

from processor.messages.batch import Batch

if TYPE_CHECKING:
    from processor.engine.partitions import OwnedPartition
    from processor.messages.record import Record


class Remaining:
    """The records of a batch that have no outcome yet, in order; `part` returns those to try next.

    Up to `together` records whose handlers act outside are tried at a time; any other `alone` record is tried alone.
    """

    def __init__(self, batch: Batch, together: int = 1) -> None:
        self._rest = batch
        self._together = together
        self._suspects = 0  # one of this many first records is at fault
        self._limit: int | None = None
        self._size = 0
        self.tries = 0  # of the same part, without a message at fault

    def part(self) -> Batch:
        """Return the records to try next; empty when all have an outcome."""
        size = len(self._rest) if self._suspects == 0 else max(1, self._suspects // 2)
        if self._limit is not None:
            size = min(size, self._limit)
        rows = self._rest.rows[:size] if size == len(self._rest) else self._rest.as_rows()[:size]
        lone = next((index for index, record in enumerate(rows) if record.alone), None)
        if lone == 0:
            acting = next((index for index, record in enumerate(rows) if not record.acts), len(rows))
            size = max(1, min(acting, self._together))
        elif lone is not None:
            size = lone
        self._size = size
        return self._rest.part(0, size)

    def committed(self) -> None:
        self.tries = 0
        self._rest = self._rest.part(self._size, len(self._rest)) if self._size < len(self._rest) else Batch(())
        self._suspects = max(0, self._suspects - self._size)
        self._limit = None

    def cut(self, index: int) -> None:
        """End the next part before this record."""
        self._limit = max(1, index)

    def narrow(self) -> Record | None:
        """Note that the part has a record at fault; return it if it was alone."""
        self._limit = None
        if self._size == 1:
            self._suspects = 0
            return self._rest.as_rows()[0]
        self._suspects = self._size
        return None

    def found(self) -> None:
        """End the search: the record at fault is known."""
        self.tries = 0
        self._suspects = 0
        self._limit = None

    def leave(self, owned: OwnedPartition, offset: int = 0) -> None:
        """Remove the records of a partition from this offset on: they are read again later."""
        self.found()
        self._rest = Batch.of_rows(
            record
            for record in self._rest.as_rows()
            if record.partition != owned.partition or record.message.offset < offset
        )


def let_go(error: BaseException) -> None:
    """Clear our own frames in this error's traceback.

    Some of them hold the error itself: the cycle would keep their batch in memory until garbage collection.
    """
    seen: set[int] = set()
    earlier: list[BaseException | None] = [error]
    while earlier:
        one = earlier.pop()
        if one is not None and id(one) not in seen:
            seen.add(id(one))
            ours = False
            for frame, _ in traceback.walk_tb(one.__traceback__):
                # Only our own: a handler's frame may still run, in a task that got the same error, and would be ended.
                name = frame.f_globals.get("__name__", "")
                ours = name.startswith("processor.") or (ours and name == "contextlib")
                if ours:
                    with suppress(RuntimeError):  # it is still running
                        frame.clear()
            earlier += [one.__cause__, one.__context__]
