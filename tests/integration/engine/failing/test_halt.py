"""`failure.policy = "halt"`: a partition goes no further than to the message that failed."""

from __future__ import annotations

from itertools import repeat
from typing import Any

import pytest

from processor import Reject, Retry, Unavailable
from processor.errors import Halt
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.logs import events
from tests.support.scenes import THREE, in_one_batch, messages, statuses


@pytest.mark.parametrize("before", [True, False], ids=["with an earlier batch", "with its own batch"])
async def test_collision_halts_its_partition(bench: MakeBench, before: bool) -> None:
    b = bench({"T": "apply", "G": "hold_up"}, failure={"policy": "halt"})
    rest = [*messages("m1"), Sent({"what": "another"}, id="m0"), *messages("m3")]

    async def run_into_it() -> None:
        async with b.running():
            if before:
                b.send(messages("m0"))
                await b.done()
            await in_one_batch(b, rest if before else [*messages("m0"), *rest])
            await b.done()

    with pytest.raises(Halt, match="m0"):
        await run_into_it()
    with pytest.raises(Halt, match="m0"):
        await b.run_until_done()
    assert await b.effects() == ["m0", "m1"]
    assert b.committed() == {0: 3}
    assert await statuses(b) == {}


async def finish_the_other_partition(bench: Bench, name: str) -> None:
    bench.send(messages(name, partition=1))
    await bench.done_with(1)


async def test_partition_that_is_halted_after_another_of_its_messages_was_to_wait_stays_halted(
    bench: MakeBench, logs: list[Any]
) -> None:
    """m0's write is refused only when it is flushed, after m1 has asked to be tried again."""
    b = bench({"T": "planned", "G": "hold_up"}, partitions=2, failure={"policy": "halt"}, retry=THREE)
    await b.execute("ALTER TABLE effects ADD CONSTRAINT good CHECK (what <> 'm0')")
    handlers.plans["m1"] = iter([Retry("not yet", after=0.0)])
    async with b.running():
        await b.until(lambda: len(b.engines[0].reader.fetching()) == 2, "both partitions")
        await in_one_batch(b, messages("m0", "m1", "m2"))
        await b.until(lambda: events(logs, "partition_halted"), "the halt")
        for n in range(3):
            await finish_the_other_partition(b, f"other{n}")
        assert b.committed()[0] == 1
    assert events(logs, "partition_held") == []
    assert len(events(logs, "partition_halted")) == 1
    await b.execute("ALTER TABLE effects DROP CONSTRAINT good")
    await b.run_until_done()
    assert [what for what in await b.effects() if what.startswith("m")] == ["m0", "m1", "m2"]
    assert await statuses(b) == {}


@pytest.mark.parametrize("error", [Retry, Unavailable])
async def test_partition_with_a_message_to_wait_for_after_it_was_halted_stays_halted_and_skips_nothing(
    bench: MakeBench, logs: list[Any], error: type[Retry | Unavailable]
) -> None:
    """What cannot be decoded is known before anything of the batch is tried."""
    b = bench({"T": "planned", "G": "hold_up"}, partitions=2, failure={"policy": "halt"}, retry=THREE)
    handlers.plans["m0"] = iter([error("not yet", after=0.0)])
    async with b.running():
        await b.until(lambda: len(b.engines[0].reader.fetching()) == 2, "both partitions")
        await in_one_batch(b, [*messages("m0"), Sent(b"{", id="m1"), *messages("m2")])
        await b.until(lambda: events(logs, "partition_halted"), "the halt")
        for n in range(3):
            await finish_the_other_partition(b, f"other{n}")
            b.send(messages(f"m{n + 3}"))
    assert events(logs, "partition_held") == [], "a partition that waits goes on after a while"
    assert [what for what in await b.effects() if what.startswith("m")] in ([], ["m0"])
    assert b.committed()[0] <= 2
    await b.run_until_done(PROCESSOR_FAILURE__POLICY="dead-letter")
    assert [what for what in await b.effects() if what.startswith("m")] == ["m0", "m2", "m3", "m4", "m5"]
    assert await statuses(b) == {"m1": "failed"}


async def test_message_at_which_a_partition_is_halted_is_not_passed_when_one_before_it_is_tried_again(
    bench: MakeBench, logs: list[Any]
) -> None:
    """m1 fails while m0's write is only queued; that one is refused afterwards, and asks for another try."""
    slowly = {"attempts": 3, "first_delay_ms": 1_000, "max_delay_ms": 1_000}
    b = bench({"T": "planned", "G": "hold_up"}, partitions=2, failure={"policy": "halt"}, retry=slowly)
    await b.execute(
        "CREATE UNIQUE INDEX good ON effects (what) WHERE what = 'm0'", "INSERT INTO effects (what) VALUES ('m0')"
    )
    handlers.plans["m1"] = repeat(Reject("bad"))
    async with b.running():
        await b.until(lambda: len(b.engines[0].reader.fetching()) == 2, "both partitions")
        await in_one_batch(b, messages("m0", "m1", "m2"))
        await b.until(lambda: events(logs, "partition_halted"), "the halt")
        await b.until(lambda: events(logs, "message_retried", message_id="m0"), "the other one's first try")
        await b.execute("DROP INDEX good", "DELETE FROM effects")
        for n in range(3):
            await finish_the_other_partition(b, f"other{n}")
            b.send(messages(f"m{n + 3}"))
    assert events(logs, "partition_held") == [], "a partition that waits goes on after a while"
    assert [what for what in await b.effects() if what.startswith("m")] in ([], ["m0"])
    assert b.committed()[0] <= 2
    handlers.plans.clear()
    await b.run_until_done()
    assert [what for what in await b.effects() if what.startswith("m")] == [f"m{n}" for n in range(6)]
    assert await statuses(b) == {}
