"""How many messages of a partition may fail before it is better to stop than to go on.

A few bad ones in a hundred are ordinary. When all of them fail, it is the deployment that is broken, and a topic
emptied into its dead-letter topic helps nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processor.settings.schema import FailureSettings


class Budget:
    """Of one partition, while this process owns it."""

    def __init__(self, settings: FailureSettings) -> None:
        self._consecutive = settings.budget_consecutive
        self._percent = settings.budget_percent
        self._recent: deque[bool] = deque(maxlen=settings.budget_window)
        self._in_a_row = 0

    def exceeded(self, failed: Sequence[bool]) -> str | None:
        """Why these outcomes, in order, would be too much; nothing is counted yet."""
        in_a_row = self._in_a_row
        for one in failed:
            in_a_row = in_a_row + 1 if one else 0
            if in_a_row > self._consecutive:
                return f"more than {self._consecutive} messages in a row failed (failure.budget_consecutive)"
        recent = [*self._recent, *failed][-self._window :]
        if len(recent) == self._window and sum(recent) * 100 > self._percent * self._window:
            return f"more than {self._percent} % of the last {self._window} messages failed (failure.budget_percent)"
        return None

    def count(self, failed: Sequence[bool]) -> None:
        self._recent.extend(failed)
        last_good = next((index for index, one in enumerate(reversed(failed)) if not one), None)
        self._in_a_row = self._in_a_row + len(failed) if last_good is None else last_good

    @property
    def _window(self) -> int:
        assert self._recent.maxlen is not None
        return self._recent.maxlen
