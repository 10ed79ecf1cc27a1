"""Messages of a key stay in order when one of them is tried again, collides or is redriven."""

from __future__ import annotations

import hashlib
import json

from processor import Retry
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Sent
from tests.support.scenes import THREE, in_one_batch, messages, redrive, statuses


async def test_message_in_retry_whose_key_is_parked_meanwhile_waits_and_is_redriven_in_order(bench: MakeBench) -> None:
    """K3's write is refused only when it is flushed, after K4 has asked to be tried again."""
    b = bench({"T": "planned", "G": "hold_up"}, failure={"policy": "park-key"}, retry=THREE)
    await b.execute("ALTER TABLE effects ADD CONSTRAINT good CHECK (what <> 'K3')")
    handlers.plans["K4"] = iter([Retry("not yet", after=0.05)])
    async with b.running():
        await in_one_batch(b, messages("K3", "K4", "K5", key=b"K"))
        await b.done()
        assert await statuses(b) == {"K3": "failed", "K4": "parked", "K5": "parked"}
        rows = await b.inbox()
        assert {rows[id_]["parked_key"] for id_ in ("K3", "K4", "K5")} == {hashlib.sha256(b"K").digest()}
        assert json.loads(rows["K4"]["payload"]) == {"what": "K4"}
        assert handlers.calls["K4"] == 1
        await b.execute("ALTER TABLE effects DROP CONSTRAINT good")
        code, told = await redrive(b, "--key", "K")
        assert code == 0, told
        await b.done()
    assert await b.effects() == ["K3", "K4", "K5"]
    assert await statuses(b) == {}


async def test_collision_parks_its_key_for_the_rest_of_its_batch(bench: MakeBench) -> None:
    b = bench({"T": "apply", "G": "hold_up"}, failure={"policy": "park-key"})
    async with b.running():
        b.send(messages("K1", key=b"K"))
        await b.done()
        another = Sent({"what": "another"}, b"K", id="K1")
        await in_one_batch(b, [another, *messages("K2", "K3", key=b"K"), *messages("A1", key=b"A")])
        await b.done()
        assert await b.effects() == ["K1", "A1"]
        collided = f"K1~{b.place(2)}"
        assert await statuses(b) == {collided: "failed", "K2": "parked", "K3": "parked"}
        assert json.loads((await b.inbox())[collided]["error"])["reason"] == "collision"
        code, told = await redrive(b, "--key", "K")
        assert (code, f"a collision keeps its key parked: {collided}" in told) == (1, True), told
        assert await b.effects() == ["K1", "A1"]
        code, told = await redrive(b, "--id", collided, "--despite-collision")
        assert code == 0, told
        await b.done()
    assert await b.effects() == ["K1", "A1", "another", "K2", "K3"]
