"""Leases of effects: one call for a duplicate, and none taken from another handler."""

from __future__ import annotations

import struct
import zlib

import pytest

from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Sent
from tests.support.scenes import in_one_batch, messages, statuses


@pytest.mark.parametrize("keys", [(b"k", b"k"), (b"one", b"two"), (None, None)], ids=["one key", "two keys", "no key"])
async def test_duplicate_in_the_same_batch_makes_no_second_call(
    bench: MakeBench, keys: tuple[bytes | None, bytes | None]
) -> None:
    b = bench({"T": {"call": "stall", "effect": True}, "G": "hold_up"}, concurrency=4)
    async with b.running():
        twice = [Sent({"what": "m0"}, key, id="m0") for key in keys]
        await in_one_batch(b, [*twice, *messages("m1")])
        await b.done()
    assert (handlers.calls["m0"], handlers.calls["m1"]) == (1, 1)
    assert sorted(await b.effects()) == ["m0", "m1"]
    assert await statuses(b) == {}


@pytest.mark.parametrize("lease", ["-1 second", "1 second"], ids=["expired", "about to expire"])
async def test_lease_of_a_handler_that_is_no_effect_any_more_is_waited_for_and_taken_over(
    bench: MakeBench, lease: str
) -> None:
    """Nobody reaps where there are no effects."""
    b = bench("queue")
    b.send(messages("m0"))
    await b.run_until_done()
    leased = messages("m1", "m2")
    (checksum,) = struct.unpack("i", struct.pack("I", zlib.crc32(leased[0].payload() or b"")))
    await b.execute(
        f"""INSERT INTO inbox (key, partition_id, "offset", payload_hash, status, attempts, unfinished, message_id,
                               type, record_key, lease_owner, lease_until)
            SELECT inbox_key(consumer, 'm1'), partition_id, 1, {checksum}, 'processing', 0, 1, 'm1', 'T', 'k',
                   'the dead', now() + '{lease}' FROM ledger"""
    )
    b.send(leased)
    await b.run_until_done()
    assert await b.effects() == ["m0", "m1", "m2"]
    assert await statuses(b) == {}
