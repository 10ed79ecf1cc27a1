"""The claim of the next batch while the one at hand is in its handler: it saves time, and never decides anything."""

from __future__ import annotations

import asyncio
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import pytest

from processor import Database, Messages, Retry
from processor.engine import claim_ahead
from processor.engine.claim_ahead import ClaimAhead
from processor.engine.engine import Engine
from processor.errors import Halt
from processor.messages.batch import Records
from processor.messages.record import Record
from processor.postgres.inbox import COPY_FROM, Claims
from processor.postgres.session import Session
from tests.integration.conftest import MakeBench
from tests.support import handlers, sql
from tests.support.bench import Bench, Sent
from tests.support.logs import events
from tests.support.waiting import eventually

SIZE = COPY_FROM  # of a batch: the smallest that is claimed ahead
BATCHES = 6
COUNT = SIZE * BATCHES
SOON_SECONDS = 10.0

# What the claim ahead of this consumer's looks like to Postgres, as seen from the batch at hand.
IS_AHEAD = """
    datname = current_database() AND application_name LIKE 'processor:%' AND pid <> pg_backend_pid()
    AND xact_start IS NOT NULL
"""


class Watched:
    """What became of the claims that were made ahead."""

    def __init__(self) -> None:
        self.begun: list[list[int]] = []  # the offsets of each
        self.made: list[bool] = []  # whether it got all its keys
        self.used = 0
        self.dropped = 0  # that were under way or made
        self.failed = 0  # in their claim


Meet = Callable[[Messages[Any], Database], Awaitable[None]]


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    """Every claim ahead; how long the last batch took decides nothing here."""
    seen = Watched()
    make, claims, drop = ClaimAhead._make, ClaimAhead.claims, ClaimAhead.drop

    async def making(self: ClaimAhead, session: Session, records: Records) -> tuple[Any, Claims | None]:
        seen.begun.append([offset for span in records.spans for offset in span.offsets])  # type: ignore[union-attr]
        try:
            connection, found = await make(self, session, records)
        except Exception:
            seen.failed += 1
            raise
        seen.made.append(found is not None)
        return connection, found

    async def claiming(self: ClaimAhead, connection: Any, records: Sequence[Record]) -> Claims | None:
        found = await claims(self, connection, records)
        seen.used += found is not None
        return found

    async def dropping(self: ClaimAhead) -> None:
        seen.dropped += self._claim is not None
        await drop(self)

    monkeypatch.setattr(ClaimAhead, "_make", making)
    monkeypatch.setattr(ClaimAhead, "claims", claiming)
    monkeypatch.setattr(ClaimAhead, "drop", dropping)
    monkeypatch.setattr(claim_ahead, "SHORT_SECONDS", float("inf"))
    return seen


def numbered(count: int = COUNT, first: int = 0, partition: int = 0) -> list[Sent]:
    return [
        Sent({"what": f"w{n}"}, f"k{n % 50}".encode(), id=f"m{n}", partition=partition)
        for n in range(first, first + count)
    ]


HANDLERS = {"T": "by_column", "G": "hold_up"}
BATCH: dict[str, Any] = {"batch": {"max_messages": SIZE}}


async def backlog(bench: Bench, records: Sequence[Sent]) -> Engine:
    """All of these are read while the engine is busy with one before them; then full batches follow each other."""
    (engine,) = bench.engines
    handlers.gate.clear()
    bench.send([Sent({"what": "gate"}, b"gate", "G", "gate")])
    await bench.until(lambda: handlers.calls["gate"], "busy")
    bench.send(records)
    await bench.until(lambda: engine._source.buffered == len(records), "all of them read")
    handlers.gate.set()
    return engine


async def work_off(bench: Bench, records: Sequence[Sent]) -> None:
    """A backlog of these, from a start to the end of it."""
    async with bench.running():
        await backlog(bench, records)
        await bench.done()


def on_batch_with(monkeypatch: pytest.MonkeyPatch, id_: str, do: Meet) -> None:
    """Do this in the handler of the first batch with that message, and only there."""
    done = False

    async def meet(messages: Messages[Any], db: Database) -> None:
        nonlocal done
        if not done and id_ in messages.ids:
            done = True
            await do(messages, db)

    monkeypatch.setattr(handlers, "meet", meet)


async def claimed(engine: Engine) -> None:
    """Until the claim ahead of the batch at hand is made; it begins when a handler waits for the first time."""
    await asyncio.sleep(0)
    task = engine._loop._ahead._claim
    assert task is not None, "nothing is claimed ahead"
    await asyncio.wait({task})


def said(bench: Bench) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs()]


async def held(bench: Bench) -> int:
    """Transactions of the consumer's that are open while it does nothing in them."""
    (row,) = await bench.rows(
        "SELECT count(*) AS n FROM pg_stat_activity WHERE application_name = $1 AND state LIKE 'idle in transaction%'",
        f"processor:{bench.consumer}",
    )
    return int(row["n"])


async def nothing_is_left_open(bench: Bench) -> None:
    """Postgres notices the end of the consumer's connections in a moment, and sooner than it gives up on them."""
    ours = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1"

    def gone() -> bool:
        return bool(sql.value(bench.database, ours, f"processor:{bench.consumer}") == 0)

    await asyncio.to_thread(eventually, gone, SOON_SECONDS, "no connection of the consumer's")


async def not_completed(bench: Bench) -> dict[str, str]:
    return {id_: row["status"] for id_, row in (await bench.inbox()).items() if row["status"] != "completed"}


WHATS = [f"w{n}" for n in range(COUNT)]


# --- as a rule ---


async def test_full_batches_of_a_backlog_are_claimed_ahead_and_everything_is_done_once(
    bench: MakeBench, watched: Watched
) -> None:
    b = bench(HANDLERS, **BATCH)
    await work_off(b, numbered())
    assert await b.effects() == said(b) == WHATS
    assert await not_completed(b) == {}
    assert len(await b.inbox()) == COUNT + 1
    assert {id_: count for id_, count in handlers.calls.items() if count > 1} == {}
    # The first full batch follows a record of another handler, and is claimed in its turn; the others are not.
    assert watched.begun == [list(range(SIZE * n + 1, SIZE * n + SIZE + 1)) for n in range(1, BATCHES)]
    assert (watched.made, watched.used, watched.failed) == ([True] * (BATCHES - 1), BATCHES - 1, 0)


async def test_handlers_of_single_messages_have_their_batches_claimed_ahead_too(
    bench: MakeBench, watched: Watched
) -> None:
    b = bench({"T": "apply", "G": "hold_up"}, **BATCH)
    await work_off(b, numbered())
    assert await b.effects() == said(b) == WHATS
    assert watched.used == BATCHES - 1


async def test_handlers_of_a_batch_that_was_claimed_ahead_see_what_the_one_before_wrote(
    bench: MakeBench, watched: Watched
) -> None:
    """Though its transaction is older than that one's commit."""
    b = bench({"T": "say_how_many", "G": "hold_up"}, **BATCH)
    await work_off(b, numbered())
    assert [value["before"] for _, value, _ in b.outputs()] == list(range(COUNT))
    assert watched.used == BATCHES - 1


async def test_nothing_is_claimed_ahead_while_batches_take_long(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim_ahead, "SHORT_SECONDS", 0.0)
    b = bench(HANDLERS, **BATCH)
    await work_off(b, numbered())
    assert await b.effects() == said(b) == WHATS
    assert watched.begun == []


async def test_claim_ahead_is_an_open_transaction_that_nobody_sees_yet(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)
    seen: list[int] = []

    async def look(messages: Messages[Any], db: Database) -> None:
        await claimed(b.engines[0])
        seen.append(await held(b))
        seen.append(len(await b.inbox()))

    on_batch_with(monkeypatch, f"m{SIZE}", look)
    await work_off(b, numbered())
    assert seen == [2, 1 + SIZE]
    assert await b.effects() == said(b) == WHATS


@pytest.mark.parametrize("kind", ["large", "repeated within", "known"])
async def test_batch_that_cannot_be_claimed_by_copy_is_taken_ahead_in_vain(
    bench: MakeBench, watched: Watched, kind: str
) -> None:
    """So few records that a COPY does not pay, the same message twice in one batch, or one that was done long ago."""
    b = bench(HANDLERS, batch={"max_messages": SIZE, "max_bytes": 20_000})
    sent = numbered()
    if kind == "large":
        for record in sent[SIZE:]:
            record.value["padding"] = "x" * 1000
    elif kind == "repeated within":
        sent[SIZE + 20] = numbered()[SIZE + 10]
    async with b.running():
        if kind == "known":
            b.send(numbered(1, SIZE + 20))
            await b.done()
        await backlog(b, sent)
        await b.done()
    assert Counter(await b.effects()) == Counter(said(b))
    assert Counter(await b.effects()) == Counter(w for w in WHATS if kind != "repeated within" or w != f"w{SIZE + 20}")
    assert set(handlers.calls.values()) == {1}
    assert await not_completed(b) == {}
    assert False in watched.made


async def test_without_a_second_connection_batches_are_claimed_in_their_turn(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    """The role may have three, which is what a worker would have without claims ahead."""
    b = bench(HANDLERS, **BATCH)

    async def wait(messages: Messages[Any], db: Database) -> None:
        await claimed(b.engines[0])

    on_batch_with(monkeypatch, "m0", wait)
    role = f"role_{uuid.uuid4().hex[:8]}"
    await b.execute(
        f"CREATE ROLE {role} LOGIN PASSWORD 'secret' CONNECTION LIMIT 3",
        f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {role}",
        f"GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO {role}",
    )
    parts = urlsplit(b.database)
    limited = urlunsplit(parts._replace(netloc=f"{role}:secret@{parts.netloc.rpartition('@')[2]}"))
    b.config.write_text(b.config.read_text().replace(b.database, limited))
    try:
        async with b.running():
            await backlog(b, numbered())
            await b.done()
        assert await b.effects() == said(b) == WHATS
        assert await not_completed(b) == {}
        assert watched.failed >= 1
        assert watched.used == 0
        assert events(logs, "starting_over") == []
    finally:
        await nothing_is_left_open(b)
        await b.execute(f"DROP OWNED BY {role}", f"DROP ROLE {role}")


# --- the same message in two batches ---


async def wait_for_each_other(bench: Bench) -> None:
    """Until the claim ahead waits for a key that the batch at hand holds."""

    async def waits() -> bool:
        rows = await bench.rows(
            "SELECT 1 FROM pg_stat_activity WHERE application_name = $1 AND wait_event_type = 'Lock'",
            f"processor:{bench.consumer}",
        )
        return bool(rows)

    await bench.until(waits, "the claim ahead waits")


async def test_message_that_comes_again_in_the_next_batch_is_done_once(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)
    sent = numbered()
    sent[2 * SIZE + 30] = numbered()[SIZE + 10]  # batches 1 and 2

    async def wait(messages: Messages[Any], db: Database) -> None:
        await wait_for_each_other(b)

    on_batch_with(monkeypatch, f"m{SIZE + 10}", wait)
    async with b.running():
        await backlog(b, sent)
        await b.done()
    assert await b.effects() == said(b) == [what for what in WHATS if what != f"w{2 * SIZE + 30}"]
    assert handlers.calls[f"m{SIZE + 10}"] == 1
    assert await not_completed(b) == {}
    assert (await b.inbox())[f"m{SIZE + 10}"]["offset"] == SIZE + 11
    assert watched.made[:2] == [True, False]  # of the batches 1 and 2
    assert watched.used == 1


async def test_all_messages_of_a_batch_come_again_in_the_next(bench: MakeBench, watched: Watched) -> None:
    b = bench(HANDLERS, **BATCH)
    once = numbered()
    async with b.running():
        await backlog(b, [record for n in range(BATCHES) for record in once[n * SIZE : (n + 1) * SIZE] * 2])
        await b.done()
    assert await b.effects() == said(b) == WHATS
    assert set(handlers.calls.values()) == {1}
    assert watched.begun


async def test_message_that_fails_gets_its_try_when_it_comes_again_in_the_next_batch(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim ahead gets the key as soon as the batch at hand is rolled back, and must give it back."""
    b = bench(HANDLERS, **BATCH)
    sent = numbered()
    again = f"m{SIZE + 10}"
    sent[2 * SIZE + 30] = numbered()[SIZE + 10]

    async def meet(messages: Messages[Any], db: Database) -> None:
        if again not in messages.ids:
            return
        if handlers.calls[again] == 1:
            await wait_for_each_other(b)
        own = messages[messages.ids.index(again)]
        if own.offset == SIZE + 11:
            raise RuntimeError(f"told to fail on {again}")

    monkeypatch.setattr(handlers, "meet", meet)
    async with b.running():
        await backlog(b, sent)
        await b.done()
    good = [what for what in WHATS if what not in (f"w{SIZE + 10}", f"w{2 * SIZE + 30}")]
    expected = [*good[: 2 * SIZE + 29], f"w{SIZE + 10}", *good[2 * SIZE + 29 :]]
    assert await b.effects() == said(b) == expected
    assert await not_completed(b) == {}
    row = (await b.inbox())[again]
    assert (row["status"], row["attempts"]) == ("completed", 2)
    assert watched.dropped == 1


async def test_other_payload_under_an_id_of_the_batch_before_fails_as_a_collision(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)
    sent = numbered()
    sent[2 * SIZE + 30] = Sent({"what": "another"}, b"k", id=f"m{SIZE + 10}")

    async def wait(messages: Messages[Any], db: Database) -> None:
        await wait_for_each_other(b)

    on_batch_with(monkeypatch, f"m{SIZE + 10}", wait)
    async with b.running():
        await backlog(b, sent)
        await b.done()
    assert await b.effects() == said(b) == [what for what in WHATS if what != f"w{2 * SIZE + 30}"]
    assert await not_completed(b) == {f"m{SIZE + 10}~{b.place(2 * SIZE + 31)}": "failed"}
    assert False in watched.made


async def test_two_that_claim_the_same_messages_ahead_in_opposite_order_wait_for_each_other_and_not_for_ever(
    bench: MakeBench, watched: Watched
) -> None:
    b = bench(HANDLERS, partitions=2, **BATCH)
    async with b.running(engines=2):
        await b.until(lambda: all(len(engine._source.fetching()) == 1 for engine in b.engines), "one partition each")
        b.send([Sent({"what": "gate"}, b"gate", "G", f"gate{n}", partition=n) for n in range(2)])
        await b.until(lambda: handlers.calls["gate0"] and handlers.calls["gate1"], "both busy")
        b.send([*numbered(), *reversed(numbered(partition=1))])
        await b.until(lambda: sum(engine._source.buffered for engine in b.engines) == 2 * COUNT, "all of them read")
        handlers.gate.set()
        await b.done()
    assert Counter(await b.effects()) == Counter(said(b)) == Counter(WHATS)
    assert await not_completed(b) == {}
    assert len(await b.inbox()) == COUNT + 2
    assert watched.used >= 1
    assert len(watched.begun) > watched.used, "they have met"


# --- the batch at hand does not go through ---


@pytest.mark.parametrize("policy", ["dead-letter", "park-key"])
async def test_message_fails_while_the_next_batch_is_claimed(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    b = bench(HANDLERS, **BATCH, failure={"policy": policy})
    bad = SIZE + 10
    tries: list[tuple[int, bool]] = []  # how many messages, and whether anything was claimed ahead

    async def fail(messages: Messages[Any], db: Database) -> None:
        if f"m{bad}" in messages.ids:
            if not tries:
                await claimed(b.engines[0])
            tries.append((len(messages), b.engines[0]._loop._ahead._claim is not None))
            raise RuntimeError("as told")

    monkeypatch.setattr(handlers, "meet", fail)
    async with b.running():
        await backlog(b, numbered())
        await b.done()
        assert await held(b) == 0
    parked = [n for n in range(bad + 1, COUNT) if n % 50 == bad % 50] if policy == "park-key" else []
    good = [f"w{n}" for n in range(COUNT) if n != bad and n not in parked]
    assert await b.effects() == said(b) == good
    assert await not_completed(b) == {f"m{bad}": "failed", **{f"m{n}": "parked" for n in parked}}
    assert tries[0] == (SIZE, True)
    assert tries[-1] == (1, False)
    assert {claim for _, claim in tries[1:]} == {False}, "the claim is taken back first"
    assert watched.dropped == 1
    assert watched.used >= 1


async def test_partition_halts_while_its_next_batch_is_claimed(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH, failure={"policy": "halt"})
    bad = SIZE + 10
    handlers.failing.add(f"m{bad}")

    async def everything() -> None:
        async with b.running():
            await backlog(b, numbered())
            await b.done()

    async def wait(messages: Messages[Any], db: Database) -> None:
        await claimed(b.engines[0])

    on_batch_with(monkeypatch, f"m{bad}", wait)
    with pytest.raises(Halt, match=f"told to fail on .'m{bad}'"):
        await everything()
    assert await b.effects() == said(b) == WHATS[:bad]
    assert len(await b.inbox()) == bad + 1
    await nothing_is_left_open(b)
    assert watched.dropped == 1
    handlers.failing.clear()
    await b.run_until_done()
    assert await b.effects() == said(b) == WHATS


@pytest.mark.parametrize("policy", ["dead-letter", "park-key"])
async def test_message_is_tried_again_while_the_next_batch_is_claimed(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """Its partition waits, and reads what was claimed ahead once more."""
    b = bench(HANDLERS, **BATCH, failure={"policy": policy}, retry={"attempts": 9})
    later = f"m{SIZE + 10}"
    alone: list[int] = []
    ahead_of_it: list[bool] = []

    async def come_again(messages: Messages[Any], db: Database) -> None:
        if later in messages.ids:
            if not ahead_of_it:
                await claimed(b.engines[0])
            ahead_of_it.append(b.engines[0]._loop._ahead._claim is not None)
            if len(messages) == 1:
                alone.append(messages[0].attempt)
            if len(alone) < 3:
                raise Retry("not yet", after=0.0)

    monkeypatch.setattr(handlers, "meet", come_again)
    async with b.running():
        await backlog(b, numbered())
        await b.done()
        assert await held(b) == 0
    assert await b.effects() == said(b) == WHATS
    assert await not_completed(b) == {}
    assert alone == [1, 2, 3]
    assert ahead_of_it == [True] + [False] * (len(ahead_of_it) - 1)
    assert watched.dropped == 1
    # What was claimed ahead and forgotten is claimed once more.
    times = Counter(offset for offsets in watched.begun for offset in offsets)
    assert times[2 * SIZE + 1] >= 1
    assert len(watched.begun) > watched.used >= 1


async def test_partition_waits_while_the_other_goes_on_with_what_was_taken_ahead(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a batch of both, only the records of the one that waits are forgotten."""
    b = bench(HANDLERS, partitions=2, **BATCH, retry={"attempts": 9})
    half = COUNT // 2
    sent = [*numbered(half), *numbered(half, half, partition=1)]
    later = "m60"  # of partition 0
    alone: list[int] = []

    async def come_again(messages: Messages[Any], db: Database) -> None:
        if later in messages.ids:
            if not watched.dropped:
                await claimed(b.engines[0])
            if len(messages) == 1:
                alone.append(messages[0].attempt)
            if len(alone) < 2:
                raise Retry("not yet", after=0.0)

    monkeypatch.setattr(handlers, "meet", come_again)
    async with b.running():
        await backlog(b, sent)
        await b.done()
    whats = await b.effects()
    assert sorted(whats) == sorted(said(b)) == sorted(WHATS)
    first = {f"w{n}" for n in range(half)}
    for own in (first, set(WHATS) - first):
        assert [what for what in whats if what in own] == [what for what in WHATS if what in own]
    assert alone == [1, 2]
    assert watched.dropped == 1


async def test_transaction_that_fails_with_nobody_at_fault_runs_again_without_the_claim(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)

    async def stumble(messages: Messages[Any], db: Database) -> None:
        await claimed(b.engines[0])
        await db.execute("DO $$ BEGIN RAISE 'as told' USING ERRCODE = '40001'; END $$")

    on_batch_with(monkeypatch, f"m{SIZE}", stumble)
    await work_off(b, numbered())
    assert await b.effects() == said(b) == WHATS
    assert watched.dropped == 1


# --- the connection that holds the claim is lost ---


async def test_claim_ahead_that_is_killed_is_made_again_in_its_turn(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)
    killed: list[bool] = []

    async def kill(messages: Messages[Any], db: Database) -> None:
        await claimed(b.engines[0])
        rows = await db.fetch(f"SELECT pg_terminate_backend(pid) AS done FROM pg_stat_activity WHERE {IS_AHEAD}")
        killed.extend(row["done"] for row in rows)
        other = b.engines[0]._loop._ahead._other._connection
        assert other is not None
        await b.until(other.is_closed, "the end of the connection is noticed")

    on_batch_with(monkeypatch, f"m{SIZE}", kill)
    async with b.running():
        await backlog(b, numbered())
        await b.done()
        assert await held(b) == 0
    assert killed == [True]
    assert await b.effects() == said(b) == WHATS
    assert await not_completed(b) == {}
    assert len(watched.begun) - watched.used == 1, "all but the one that was killed"
    assert handlers.calls[f"m{2 * SIZE}"] == 1


async def test_claim_ahead_that_is_killed_unnoticed_costs_nothing_either(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch at hand goes on at once: who finds out first is anybody's guess."""
    b = bench(HANDLERS, **BATCH)

    async def kill(messages: Messages[Any], db: Database) -> None:
        await claimed(b.engines[0])
        await db.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {IS_AHEAD}")

    on_batch_with(monkeypatch, f"m{SIZE}", kill)
    await work_off(b, numbered())
    assert await b.effects() == said(b) == WHATS
    assert await not_completed(b) == {}
    assert len(watched.begun) > watched.used >= 1


async def test_claim_ahead_that_is_killed_while_it_waits(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench(HANDLERS, **BATCH)
    sent = numbered()
    sent[2 * SIZE + 30] = numbered()[SIZE + 10]

    async def kill(messages: Messages[Any], db: Database) -> None:
        await wait_for_each_other(b)
        await db.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {IS_AHEAD}")
        await claimed(b.engines[0])

    on_batch_with(monkeypatch, f"m{SIZE + 10}", kill)
    async with b.running():
        await backlog(b, sent)
        await b.done()
    assert await b.effects() == said(b) == [what for what in WHATS if what != f"w{2 * SIZE + 30}"]
    assert watched.failed == 1


async def test_batch_at_hand_loses_its_connection_while_the_next_is_claimed(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    b = bench(HANDLERS, **BATCH)

    async def kill(messages: Messages[Any], db: Database) -> None:
        await claimed(b.engines[0])
        await db.execute("SELECT pg_terminate_backend(pg_backend_pid())")

    on_batch_with(monkeypatch, f"m{SIZE}", kill)
    await work_off(b, numbered())
    assert await b.effects() == said(b) == WHATS
    assert await not_completed(b) == {}
    assert [event["kind"] for event in events(logs, "starting_over")] == ["ConnectionLost"]
    assert watched.dropped == 1
    assert handlers.calls[f"m{SIZE}"] == 2


# --- partitions come and go ---


async def test_partition_that_is_revoked_while_a_batch_of_it_is_taken_ahead_is_let_go(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    """Whichever of two it is: the batch is the one with the last records of the first, and some of the other."""
    b = bench(HANDLERS, partitions=2, **BATCH)
    few = SIZE + SIZE // 2
    sent = [*numbered(few), *numbered(COUNT - few, few, partition=1)]
    at_hand = asyncio.Event()
    lost: list[int] = []

    async with b.running():
        first = b.engines[0]
        everyone = b._tasks

        async def hold(messages: Messages[Any], db: Database) -> None:
            await asyncio.sleep(0)  # what is taken ahead is taken when a handler waits for the first time
            taken = first._loop._ahead._next
            if at_hand.is_set() or taken is None or len(taken.readings) < 2:
                return
            await claimed(first)
            at_hand.set()
            await b.until(lambda: first._source.outdated(taken), "a partition is to be given back")
            lost.extend(assignment.partition.number for assignment in first._source.outdated(taken))

        monkeypatch.setattr(handlers, "meet", hold)
        await backlog(b, sent)
        await b.until(at_hand.is_set, "a batch is taken ahead")
        async with b.running():
            b._tasks = [*everyone, *b._tasks]
            await b.done()
            assert len(b.engines[0]._source.owned()) == 1
    assert len(lost) == 1
    whats = await b.effects()
    assert sorted(whats) == sorted(said(b)) == sorted(WHATS)
    one = {f"w{n}" for n in range(few)}
    for own in (one, set(WHATS) - one):
        assert [what for what in whats if what in own] == [what for what in WHATS if what in own]
    assert await not_completed(b) == {}
    assert {event["finished"] for event in events(logs, "partitions_revoked")} == {True}, "released in time"
    assert watched.dropped >= 1


async def test_records_of_a_partition_with_a_history_are_handled_though_they_were_claimed_ahead(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner before us died of a record of partition 1: all of its records are looked at one by one.

    Its first records here are in a batch that was claimed ahead while the one at hand had none of them.
    """
    b = bench(HANDLERS, partitions=2, **BATCH)
    b.send([Sent({"what": "before"}, b"k", id="before", partition=1)])
    await b.run_until_done()
    await b.execute("UPDATE ledger SET suspect = '[1,2)', deaths = 1 WHERE partition = 1")
    half = COUNT // 2

    async def send(messages: Messages[Any], db: Database) -> None:
        source = b.engines[0]._source
        await claimed(b.engines[0])
        there = source.buffered
        await asyncio.to_thread(b.send, numbered(half, half, partition=1))
        await b.until(lambda: source.buffered == there + half, "those of partition 1 are read")

    on_batch_with(monkeypatch, "m0", send)
    async with b.running():
        await backlog(b, numbered(half))
        await b.done()
    assert watched.begun
    whats = await b.effects()
    assert Counter(whats) == Counter(["before", *WHATS])
    assert Counter(said(b)) == Counter(["before", *WHATS])
    assert await not_completed(b) == {}
    assert set(handlers.calls.values()) == {1}


# --- stopping ---


async def test_stop_while_a_claim_is_held_ahead_leaves_nothing_open(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch, logs: list[Any]
) -> None:
    b = bench(HANDLERS, **BATCH)
    stopped = asyncio.Event()

    async def stop(messages: Messages[Any], db: Database) -> None:
        await claimed(b.engines[0])
        b.engines[0].stop()
        stopped.set()

    on_batch_with(monkeypatch, f"m{SIZE}", stop)
    async with b.running():
        await backlog(b, numbered())
        await stopped.wait()
        await asyncio.gather(*b._tasks)  # by itself, and with nothing to tell
        assert await b.effects() == said(b) == WHATS[: 2 * SIZE]
        assert len(await b.inbox()) == 2 * SIZE + 1
        await nothing_is_left_open(b)
    assert watched.dropped == 1
    assert {event["finished"] for event in events(logs, "partitions_revoked")} == {True}
    assert (await asyncio.to_thread(b.committed))[0] == 2 * SIZE + 1
    await b.run_until_done()
    assert await b.effects() == said(b) == WHATS
    assert set(handlers.calls.values()) == {1}


async def test_halt_while_a_claim_is_held_ahead_leaves_nothing_open(
    bench: MakeBench, watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run ends from within the batch at hand."""
    b = bench(HANDLERS, **BATCH)

    async def misdirect(messages: Messages[Any], db: Database) -> None:
        await claimed(b.engines[0])
        raise Halt("as told")

    async def everything() -> None:
        async with b.running():
            await backlog(b, numbered())
            await b.done()

    on_batch_with(monkeypatch, f"m{SIZE}", misdirect)
    with pytest.raises(Halt, match="as told"):
        await everything()
    await nothing_is_left_open(b)
    assert await b.effects() == said(b) == WHATS[:SIZE]
    assert watched.dropped == 1
    handlers.output_topic = b.output
    await b.run_until_done()
    assert await b.effects() == said(b) == WHATS
