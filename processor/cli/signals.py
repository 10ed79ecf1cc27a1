"""Commands that can be interrupted at any point, and say how far they got."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stopped_by_signals() -> Iterator[asyncio.Event]:
    """Set by the first SIGINT or SIGTERM; the second one ends the process, which is as safe as any crash."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    signals = (signal.SIGINT, signal.SIGTERM)

    def on_signal() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)
            signal.signal(number, signal.SIG_DFL)

    for number in signals:
        loop.add_signal_handler(number, on_signal)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
