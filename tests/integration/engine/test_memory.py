"""What is done with is gone: nothing of a batch waits for the garbage collector, which looks seldom."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from processor.handling.run import BatchRun
from processor.messages.message import Message
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Sent

SIZE = 20
BATCHES = 20
# The current one, the one before it, and what a loop variable still holds.
FEW = 3


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize(
    ("handler", "failing"),
    [
        ("apply", False),
        ("apply_many", False),
        ("by_column", False),
        ("queue", False),
        ("reject_or_apply", True),
        ("queue_odd", True),
        ("apply", True),
        ("apply_many", True),
    ],
)
async def test_nothing_of_a_batch_is_left_when_it_is_done(bench: MakeBench, handler: str, failing: bool) -> None:
    before = alive(BatchRun), alive(Message)  # an earlier test's exception may hold some
    b = bench(handler, batch={"max_messages": SIZE})
    b.send([Sent({"what": f"w{n}"}, b"k", id=f"m{n}") for n in range(SIZE * BATCHES)])
    if failing:
        bad = range(0, SIZE * BATCHES, SIZE // 2)
        handlers.failing |= {f"m{n}" for n in bad} | {f"w{n}" for n in bad}
    async with b.running():
        await b.done()
        assert alive(BatchRun) - before[0] <= FEW
        assert alive(Message) - before[1] <= FEW * SIZE


def alive(kind: type) -> int:
    return sum(type(thing) is kind for thing in gc.get_objects())
