from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest
from structlog.testing import capture_logs

from tests.conftest import Topics, unique
from tests.support import handlers as handler_module
from tests.support import sql
from tests.support.bench import EFFECTS, Bench, write_config
from tests.support.servers import Servers


class MakeBench(Protocol):
    def __call__(self, handlers: dict[str, Any] | str = "apply", *, partitions: int = 1, **tables: Any) -> Bench: ...


@pytest.fixture
def logs() -> Iterator[list[Any]]:
    """Every event that the engine logs."""
    with capture_logs() as captured:
        yield captured


@pytest.fixture
def bench(tmp_path: Path, stack: Servers, database: str, topics: Topics) -> MakeBench:
    """A deployment whose handlers are those of tests/support/handlers.py, run inside the test's process."""

    def make(handlers: dict[str, Any] | str = "apply", *, partitions: int = 1, **tables: Any) -> Bench:
        consumer = unique("bench")
        source, target = topics("in", partitions=partitions), topics("out")
        named = {"T": handlers} if isinstance(handlers, str) else handlers
        path = tmp_path / f"{consumer}.toml"
        write_config(path, consumer, source, stack, database, {k: _full(v) for k, v in named.items()}, tables)
        handler_module.reset(target)
        handler_module.gate = asyncio.Event()
        sql.execute(database, EFFECTS)
        return Bench(path, consumer, source, target, database, stack.bootstrap_servers, partitions)

    return make


def _full(handler: Any) -> Any:
    if isinstance(handler, str):
        return handler if ":" in handler else f"tests.support.handlers:{handler}"
    return {**handler, "call": _full(handler["call"])}
