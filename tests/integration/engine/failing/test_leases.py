"""Leases of effects: one call for a duplicate, and none taken from another handler."""

from __future__ import annotations

import asyncio
import struct
import zlib
from typing import Any

import pytest

from processor import Retry
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.logs import events
from tests.support.scenes import SOON, THREE, in_one_batch, messages, statuses


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
    await lease_elsewhere(b, leased[0], lease)
    b.send(leased)
    await b.run_until_done()
    assert await b.effects() == ["m0", "m1", "m2"]
    assert await statuses(b) == {}


async def test_lease_of_a_living_process_holds_up_all_keys_of_its_partition_and_no_other_partition(
    bench: MakeBench, logs: list[Any]
) -> None:
    """There are no lanes by key for it: the partition goes on when the lease ends, and says why it waits."""
    b = bench({"T": {"call": "queue", "effect": True}}, partitions=2)
    b.send([*messages("first"), *messages("second", partition=1)])
    await b.run_until_done()
    leased, behind = messages("m0", key=b"one"), messages("m1", key=b"two")
    await lease_elsewhere(b, leased[0], "1 day")
    b.send([*leased, *behind])
    async with b.running():
        await b.until(lambda: events(logs, "partition_held"), "it waits for the lease")
        b.send(messages("other", partition=1))
        await b.done_with(1)
    (held,) = events(logs, "partition_held")
    assert held["partition"] == f"{b.input}[0]"
    assert held["reason"] == "message m0 is being processed elsewhere"
    assert held["seconds"] > 3600, "until the lease ends"
    assert (await b.effects())[2:] == ["other"]
    assert handlers.calls["m1"] == 0

    await b.execute("UPDATE inbox SET lease_until = now() - interval '1 second' WHERE status = 'processing'")
    await b.run_until_done()
    assert (await b.effects())[2:] == ["other", "m0", "m1"]
    assert await statuses(b) == {}


async def lease_elsewhere(bench: Bench, record: Sent, lease: str) -> None:
    """Another process has begun with this record, in the first partition."""
    (checksum,) = struct.unpack("i", struct.pack("I", zlib.crc32(record.payload() or b"")))
    await bench.execute(
        f"""INSERT INTO inbox (key, partition_id, "offset", payload_hash, status, attempts, unfinished, message_id,
                               type, record_key, lease_owner, lease_until)
            SELECT inbox_key(consumer, '{record.id}'), partition_id, 1, {checksum}, 'processing', 0, 1, '{record.id}',
                   'T', 'k', 'another', now() + '{lease}' FROM ledger WHERE partition = 0"""
    )


async def test_call_that_succeeded_is_not_made_again_because_another_one_of_its_batch_is(bench: MakeBench) -> None:
    """The records behind the one that is tried again are read again, and what was done outside for them stays done."""
    b = bench({"T": {"call": "planned", "effect": True}, "G": "hold_up"}, concurrency=4, retry=THREE)
    handlers.plans["m0"] = iter([Retry("not yet", after=0.0), Retry("not yet", after=0.0)])
    async with b.running():
        names = [f"m{n}" for n in range(4)]
        await in_one_batch(b, [record for name in names for record in messages(name, key=name.encode())])
        await b.done()
    assert [handlers.calls[name] for name in names] == [3, 1, 1, 1]
    assert sorted(await b.effects()) == names
    assert await statuses(b) == {}
    assert sorted(value["what"] for _, value, _ in b.outputs() if value["what"] in names) == names


async def test_call_is_made_again_by_the_next_owner_of_its_partition(bench: MakeBench) -> None:
    """What a process has done outside is known to nobody else: the next one relies on the idempotency key."""
    b = bench({"T": {"call": "planned", "effect": True}, "G": "hold_up"}, concurrency=4, effects=SOON, retry=THREE)
    handlers.plans["m0"] = iter([Retry("not yet", after=3600.0)])
    names = ["m0", "m1"]
    async with b.running():
        await in_one_batch(b, [record for name in names for record in messages(name, key=name.encode())])
        await b.until(lambda: handlers.calls["m0"] and handlers.calls["m1"], "both called")
    handlers.plans.clear()
    async with b.running():
        await b.done()
    assert [handlers.calls[name] for name in names] == [2, 2]
    assert sorted(await b.effects()) == names


async def test_lease_is_renewed_while_recovery_has_the_control_connection(bench: MakeBench) -> None:
    b = bench({"T": {"call": "stall", "effect": True}}, effects=SOON)
    handlers.failing.add("m0")  # its call comes to no end
    leases = """SELECT 1 FROM inbox WHERE status = 'processing' AND lease_until > now()
                AND lease_until > received_at + interval '2 seconds'"""
    b.send(messages("m0"))

    async def renewed_meanwhile() -> None:
        async with b.running():
            await b.until(handlers.gate.is_set, "called")
            async with b.engines[0].parts.control.use():
                await b.until(lambda: b.rows(leases), "the lease outlives its first term several times")
            b.tasks[0].cancel()

    with pytest.raises(asyncio.CancelledError):
        await renewed_meanwhile()
