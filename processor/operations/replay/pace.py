"""How fast a replay goes: no faster than it was told, and not at all while the live service falls behind."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

# A batch holds what the rate allows in this time, so that the live service never waits for a large one.
BATCH_SECONDS = 0.2


@dataclass(frozen=True, slots=True)
class Stand:
    """How the live service stands: how many offsets it has before it, and how many behind it."""

    lag: int
    position: int


def falls_behind(before: Stand, now: Stand, batch: int) -> bool:
    """Return whether the service works, and does not keep up. One that stands still is not in the replay's way."""
    return now.position > before.position and now.lag > before.lag and now.lag > batch


class Pace:
    def __init__(self, rate: float | None) -> None:
        self._rate = rate
        self._next = 0.0  # by the event loop's clock
        self._stopped = asyncio.Event()
        self._free = asyncio.Event()
        self._free.set()

    @property
    def yields(self) -> bool:
        return not self._free.is_set()

    @property
    def waits(self) -> bool:
        return self.yields or self._delay() > 0

    def largest_batch(self, most: int) -> int:
        return most if self._rate is None else max(1, min(most, int(self._rate * BATCH_SECONDS)))

    def took(self, records: int) -> None:
        """Note that this many records were taken."""
        if self._rate is not None:
            self._next = max(asyncio.get_running_loop().time(), self._next) + records / self._rate

    def hold(self, *, held: bool) -> None:
        """Stand still, or go on; once stopped it stands still no more."""
        if held and not self._stopped.is_set():
            self._free.clear()
        else:
            self._free.set()

    def stop(self) -> None:
        self._stopped.set()
        self._free.set()

    async def turn(self) -> None:
        """Wait until more records may be taken, or until the replay is stopped."""
        await self._free.wait()
        if (delay := self._delay()) > 0:
            try:
                async with asyncio.timeout(delay):
                    await self._stopped.wait()
            except TimeoutError:
                pass

    def _delay(self) -> float:
        if self._rate is None or self._stopped.is_set():
            return 0.0
        return self._next - asyncio.get_running_loop().time()
