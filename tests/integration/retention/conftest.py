"""A service whose past a test can make as long ago as it likes, and commands beside it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from processor.retention import member
from tests.support import command
from tests.support.bench import Bench

AGES = ("received_at", "finished_at", "seen_again_at")


async def age(bench: Bench, days: float, where: str = "true") -> None:
    """Rows of the inbox become so much older."""
    changes = ", ".join(f"{name} = {name} - {days} * interval '1 day'" for name in AGES)
    await bench.execute(f"UPDATE inbox SET {changes} WHERE {where}")


async def age_notes(bench: Bench, days: float) -> None:
    """What is noted of the logs' ends becomes so much older."""
    await bench.execute(f"UPDATE log_ends SET at = at - {days} * interval '1 day'")


async def offsets(bench: Bench) -> list[int]:
    """The offsets of all rows that are left."""
    return [row["offset"] for row in await bench.rows('SELECT "offset" FROM inbox ORDER BY 1')]


async def prune(bench: Bench, *arguments: str) -> dict[str, Any]:
    """What `processor prune` reports."""
    done = await asyncio.to_thread(command.processor, Path.cwd(), "prune", str(bench.config), "-o", "json", *arguments)
    assert done.returncode == 0, done
    found: dict[str, Any] = json.loads(done.stdout)
    return found


async def refused(bench: Bench) -> str:
    """The one line with which `processor prune` gives up."""
    done = await asyncio.to_thread(command.processor, Path.cwd(), "prune", str(bench.config))
    assert done.returncode == 1, done
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    return line


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention looks as soon as the service has started, and again soon."""
    monkeypatch.setattr(member, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(member, "LONGEST_SECONDS", 1.0)
