"""Kafka as an engine in the test's own process sees it: held up, refusing, or too late for a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from processor.engine.engine import Engine
from processor.errors import BatchAborted
from tests.support.bench import Bench


class Kafka:
    """Stands before the publisher: counts what goes by, and holds it up or refuses it when told so."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._publish = engine.parts.producer.publish
        self.open = asyncio.Event()
        self.refuses_after: int | None = None  # so many transactions, and only once
        self.refused = False
        self.sent: list[int] = []  # outputs of each transaction
        self.waiting = 0
        monkeypatch.setattr(engine.parts.producer, "publish", self._watched)

    async def _watched(self, parcels: Sequence[Any], *arguments: Any) -> None:
        outputs = sum(map(len, parcels))
        if outputs:
            self.waiting += 1
            await self.open.wait()
            self.waiting -= 1
            if self.refuses_after == len(self.sent):
                self.refuses_after, self.refused = None, True
                raise BatchAborted("as told")
            self.sent.append(outputs)
        await self._publish(parcels, *arguments)


async def crash(bench: Bench) -> None:
    """The engine ends without leaving anything in order."""
    (task,) = bench.tasks
    task.cancel()
    await asyncio.wait({task})
    bench.tasks.clear()
