"""Scenes that tests of failing messages share: batches of known messages, and what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.command import processor
from tests.support.deployments import PROJECT

THREE = {"attempts": 3, "first_delay_ms": 20, "max_delay_ms": 50}
SOON = {"lease_ms": 300, "reap_ms": 100}


def messages(*names: str, key: bytes | None = b"k", type_: str = "T", partition: int = 0) -> list[Sent]:
    """Each writes its own name."""
    return [Sent({"what": name}, key, type_, name, partition=partition) for name in names]


async def in_one_batch(bench: Bench, records: Sequence[Sent], gate: str = "gate") -> None:
    """Send these so that they are processed together: they come in while the engine is busy with one before them."""
    handlers.gate.clear()
    bench.send([Sent({"what": gate}, b"gate", "G", gate)])
    await bench.until(lambda: handlers.calls[gate], "busy")
    bench.send(records)
    source = bench.engines[0].reader
    await bench.until(lambda: source.buffered == len(records), "all of them read")
    handlers.gate.set()


async def statuses(bench: Bench) -> dict[str, str]:
    """Of all that is not completed, by message id."""
    return {id_: row["status"] for id_, row in (await bench.inbox()).items() if row["status"] != "completed"}


async def redrive(bench: Bench, *arguments: str) -> tuple[int, str]:
    done = await asyncio.to_thread(processor, PROJECT, "dlq", "redrive", str(bench.config), *arguments)
    return done.returncode, done.stdout + done.stderr
