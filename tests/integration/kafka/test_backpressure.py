"""Handlers slower than the topic: what is read ahead stays bounded, the group keeps its member, and nothing is lost."""

from __future__ import annotations

import pytest

from processor.kafka.assignment import Assignment
from processor.kafka.buffer import RECORD_OVERHEAD
from processor.kafka.reader import PartitionReader
from processor.messages.message import Partition
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Sent

COUNT = 6000
VALUE = b'"' + b"x" * 1500 + b'"'
LIMIT = 300_000
BATCH = 500


async def test_slow_handler_bounds_what_is_read_ahead_and_keeps_its_place_in_the_group(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(
        "slow_at_first",
        batch={"buffer_bytes": LIMIT, "max_bytes": LIMIT, "max_messages": BATCH},
        kafka={
            "session_timeout_ms": 1_500,
            "consumer": {"max.poll.interval.ms": 1_500, "heartbeat.interval.ms": 300},
        },
    )
    b.send(Sent(VALUE, f"k{n}".encode(), id=f"m{n}") for n in range(COUNT))
    buffered: list[int] = []
    paused: list[bool] = []

    def look() -> None:
        source = b.engines[0].reader
        buffered.append(source.buffered_bytes)
        paused.append(bool(source._throttle.paused))

    monkeypatch.setattr(handlers, "probe", look)
    await b.run_until_done()
    record = len(VALUE) + len(b"k5999") + len("typeT") + len("message-id") + len("m5999") + RECORD_OVERHEAD
    assert LIMIT <= max(buffered) <= LIMIT + (BATCH + 1) * record < COUNT * record // 3
    assert min(buffered) >= 0
    assert any(paused), "it was to wait long enough for a pause"
    assert not all(paused)
    assert await b.effects() == [f"m{n}" for n in range(COUNT)]
    assert set(handlers.calls.values()) == {1}
    # Each time of taking the partition raises the epoch; it was taken once.
    assert [row["epoch"] for row in await b.rows("SELECT epoch FROM ledger")] == [1]
    assert (b.engines[0].reader.buffered_bytes, b.engines[0].reader.buffered) == (0, 0)


async def test_records_of_many_partitions_that_are_up_to_date_are_bounded_too(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    partitions = 8
    b = bench(
        "slow_at_first",
        partitions=partitions,
        batch={"buffer_bytes": LIMIT, "max_bytes": LIMIT, "max_messages": BATCH},
    )
    each = BATCH // 2  # less than a batch in each, more than the buffer together
    b.send(Sent(VALUE, f"k{n}".encode(), id=f"m{n}", partition=n % partitions) for n in range(each * partitions))
    buffered: list[int] = []
    monkeypatch.setattr(handlers, "probe", lambda: buffered.append(b.engines[0].reader.buffered_bytes))
    await b.run_until_done()
    record = len(VALUE) + RECORD_OVERHEAD
    assert LIMIT <= max(buffered) <= 2 * LIMIT + (BATCH + 1) * 2 * record < each * partitions * record
    assert len(await b.effects()) == each * partitions


async def test_one_record_larger_than_the_whole_buffer_goes_through(bench: MakeBench) -> None:
    b = bench(
        "raw", batch={"buffer_bytes": 2_000, "max_bytes": 2_000, "max_messages": 10}, message={"max_bytes": 90_000}
    )
    values = [b"%d" % n + b"x" * (80_000 if n % 7 == 0 else 10) for n in range(50)]
    b.send(Sent(value, id=f"m{n}") for n, value in enumerate(values))
    await b.run_until_done()
    assert await b.effects() == [repr((b"k", value)) for value in values]


async def test_full_buffer_of_one_partition_does_not_hold_up_another_that_is_up_to_date(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(
        "slow_at_first",
        partitions=2,
        batch={"buffer_bytes": LIMIT, "max_bytes": LIMIT, "max_messages": BATCH // 10},
    )
    paused: list[set[Partition]] = []

    def look() -> None:
        if not paused and (now := b.engines[0].reader._throttle.paused):
            paused.append(set(now))
            b.send([Sent(VALUE, id="late", partition=1)])

    monkeypatch.setattr(handlers, "probe", look)
    async with b.running():
        # Both are read before the first record comes, so that the one without any is known to be up to date.
        source = b.engines[0].reader
        await b.until(lambda: len(current(source)) == 2, "both partitions are read to their end")
        b.send(Sent(VALUE, f"k{n}".encode(), id=f"m{n}", partition=0) for n in range(COUNT))
        await b.done()
    assert paused == [{Partition(b.input, 0)}]
    effects = await b.effects()
    assert len(effects) == COUNT + 1
    assert effects.index("late") < COUNT // 2


def current(source: PartitionReader) -> list[Assignment]:
    return [assignment for assignment in source.fetching() if assignment.current]
