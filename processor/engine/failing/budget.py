"""Limits how many messages of a partition may fail before the partition stops.

A few bad messages in a hundred are ordinary. When all of them fail, the deployment is broken, and emptying the topic
into its dead-letter topic helps nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from processor.settings.schema import FailureSettings


class Budget:
    """The failures of one partition while this process owns it, and their limits."""

    def __init__(self, settings: FailureSettings) -> None:
        self._consecutive = settings.budget_consecutive
        self._percent = settings.budget_percent
        self._recent: deque[bool] = deque(maxlen=settings.budget_window)
        self._in_a_row = 0

    def exceeded(self, failed: Sequence[bool]) -> str | None:
        """Return why these outcomes, in order, would exceed a limit, or None; they are not counted yet."""
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
