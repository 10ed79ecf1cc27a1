"""Handlers slower than the topic: what is read ahead stays bounded, the group keeps its member, and nothing is lost."""

from __future__ import annotations

import pytest

from processor.kafka.buffer import RECORD_OVERHEAD
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
        paused.append(bool(source._throttled))

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


async def test_one_record_larger_than_the_whole_buffer_goes_through(bench: MakeBench) -> None:
    b = bench(
        "raw", batch={"buffer_bytes": 2_000, "max_bytes": 2_000, "max_messages": 10}, message={"max_bytes": 90_000}
    )
    values = [b"%d" % n + b"x" * (80_000 if n % 7 == 0 else 10) for n in range(50)]
    b.send(Sent(value, id=f"m{n}") for n, value in enumerate(values))
    await b.run_until_done()
    assert await b.effects() == [repr((b"k", value)) for value in values]
