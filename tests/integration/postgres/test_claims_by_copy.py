"""Repeats in batches large enough for COPY: the fast way in must decide nothing that the slow one would not."""

from __future__ import annotations

import json
import zlib

import asyncpg
from confluent_kafka import Consumer, TopicPartition

from processor.postgres.claims import COPY_FROM
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.command import processor_beside
from tests.support.deployments import PROJECT

BATCH = {"max_messages": 1000, "linger_ms": 300}


def numbered(start: int, stop: int, partition: int = 0) -> list[Sent]:
    return [Sent({"what": f"w{n}"}, id=f"m{n}", key=f"k{n}".encode(), partition=partition) for n in range(start, stop)]


def words(*ranges: range) -> list[str]:
    return [f"w{n}" for numbers in ranges for n in numbers]


def said(bench: Bench) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs()]


async def watch_claims(bench: Bench) -> None:
    """Note how rows of a committed batch came in, and how many at once."""
    await bench.execute(
        "CREATE TABLE claims (id bigint GENERATED ALWAYS AS IDENTITY, how text, count bigint)",
        """CREATE FUNCTION note_claim() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN
               INSERT INTO claims (how, count)
               SELECT split_part(ltrim(current_query(), E' \\n'), ' ', 1), count(*) FROM came;
               RETURN NULL;
           END $$""",
        """CREATE TRIGGER noting AFTER INSERT ON inbox REFERENCING NEW TABLE AS came
           FOR EACH STATEMENT EXECUTE FUNCTION note_claim()""",
    )


async def claims(bench: Bench) -> list[tuple[str, int]]:
    return [(row["how"], row["count"]) for row in await bench.rows("SELECT how, count FROM claims ORDER BY id")]


async def forget_claims(bench: Bench) -> None:
    await bench.execute("DELETE FROM claims")


async def test_large_batch_comes_in_by_copy_and_a_later_one_with_known_ids_is_right(bench: MakeBench) -> None:
    b = bench(batch=BATCH)
    await watch_claims(b)
    handlers.failing |= {"m7", "m301"}
    b.send(numbered(0, 400))
    await b.run_until_done()
    ways = await claims(b)
    assert "COPY" in {how for how, _ in ways}
    assert all(how == "WITH" for how, count in ways if 2 < count < COPY_FROM)
    good = [n for n in range(400) if n not in (7, 301)]
    assert said(b) == await b.effects() == [f"w{n}" for n in good]
    assert {name for name, row in (await b.inbox()).items() if row["status"] == "failed"} == handlers.failing

    # New ones, repeats from before and within, and one of those that failed before.
    handlers.failing.clear()
    await forget_claims(b)
    b.send([*numbered(400, 500), *numbered(0, 50), *numbered(500, 600), *numbered(450, 550)])
    await b.run_until_done()
    assert {how for how, count in await claims(b) if count} <= {"COPY", "WITH"}
    assert sorted(await b.effects()) == sorted(words(range(301), range(302, 600)))
    assert said(b) == await b.effects()
    rows = await b.inbox()
    assert (rows["m7"]["status"], rows["m7"]["attempts"], rows["m7"]["error"]) == ("completed", 2, None)
    assert (rows["m301"]["status"], rows["m301"]["attempts"]) == ("failed", 1)
    assert handlers.calls["m0"] <= 3


async def test_one_known_id_among_hundreds_makes_the_copy_give_way(bench: MakeBench) -> None:
    b = bench(batch=BATCH)
    await watch_claims(b)
    b.send(numbered(0, 1))
    await b.run_until_done()
    b.send([*numbered(1, 300), *numbered(0, 1), *numbered(300, 600)])
    await forget_claims(b)
    await b.run_until_done()
    assert sum(count for _, count in await claims(b)) == 599
    assert "WITH" in {how for how, _ in await claims(b)}
    assert said(b) == await b.effects() == words(range(600))
    assert set(handlers.calls.values()) == {1}


async def test_rewind_of_large_batches_applies_nothing_again(bench: MakeBench) -> None:
    b = bench(batch=BATCH)
    b.send(numbered(0, 1500))
    await b.run_until_done()
    before = await b.rows("SELECT * FROM inbox ORDER BY key")
    consumer = Consumer({"bootstrap.servers": b.bootstrap_servers, "group.id": b.consumer, "log_level": 0})
    consumer.commit(offsets=[TopicPartition(b.input, 0, 0)], asynchronous=False)
    consumer.close()
    b.send(numbered(1500, 1700))
    await b.run_until_done()
    assert said(b) == await b.effects() == words(range(1700))
    assert set(handlers.calls.values()) == {1}
    after = {row["key"]: row for row in await b.rows("SELECT * FROM inbox")}
    assert len(after) == 1700
    assert [after[row["key"]] for row in before] == before


async def test_large_batch_with_another_payload_under_a_known_id_is_a_collision(bench: MakeBench) -> None:
    b = bench(batch=BATCH)
    b.send(numbered(0, 300))
    await b.run_until_done()
    b.send([*numbered(300, 450), Sent({"what": "other"}, id="m5"), *numbered(450, 600)])
    await b.run_until_done()
    assert said(b) == await b.effects() == words(range(600))
    (name,) = [name for name, row in (await b.inbox()).items() if row["status"] == "failed"]
    assert name.startswith("m5~")
    assert json.loads((await b.inbox())[name]["error"])["reason"] == "collision"


async def test_giving_way_for_a_known_collision_takes_back_nothing_but_itself(bench: MakeBench) -> None:
    """A second COPY in the same claim, for messages that collide within the batch, may meet a known key too."""
    b = bench(message={"on_collision": "process"}, batch=BATCH)
    count = 2 * COPY_FROM
    known = f"m5~{b.place(count + 5)}"
    await b.execute(
        f"""INSERT INTO inbox (key, partition_id, "offset", payload_hash)
            VALUES ('{b.key_of(known)}', 0, 0, {_crc(other(5))})"""
    )
    b.send([*numbered(0, count), *(Sent(other(n), id=f"m{n}", key=f"k{n}".encode()) for n in range(count))])
    await b.run_until_done()
    others = [f"other{n}" for n in range(count) if n != 5]
    assert await b.effects() == [*words(range(count)), *others]
    (found,) = await b.rows("SELECT count(*) FROM inbox")
    assert found["count"] == 2 * count, "each message has its row, or its next delivery would be applied again"


def other(n: int) -> dict[str, str]:
    return {"what": f"other{n}"}


async def test_failure_that_splits_a_large_batch_claims_each_message_once(bench: MakeBench) -> None:
    """The batch is rolled back and comes again in parts, some of them still large enough for COPY."""
    b = bench("apply_many", batch=BATCH)
    handlers.failing |= {"m100", "m555"}
    b.send(numbered(0, 900))
    await b.run_until_done()
    good = [f"w{n}" for n in range(900) if f"m{n}" not in handlers.failing]
    assert said(b) == await b.effects() == good
    assert len(await b.inbox()) == 900


async def test_two_engines_that_claim_the_same_ids_at_once_in_large_batches_apply_each_once(bench: MakeBench) -> None:
    b = bench(partitions=2, batch=BATCH)
    await watch_claims(b)
    forward = numbered(0, 2500, partition=0)
    b.send([*forward, *reversed(numbered(0, 2500, partition=1))])
    async with b.running(engines=2):
        await b.done()
    assert sorted(await b.effects()) == sorted(words(range(2500)))
    assert sorted(said(b)) == sorted(words(range(2500)))
    assert sum(count for _, count in await claims(b)) == 2500
    assert any(how == "COPY" for how, _ in await claims(b))


async def test_claim_waits_for_another_transaction_and_takes_its_word(bench: MakeBench) -> None:
    """A key in a large batch that somebody else is just inserting: COPY waits, and gives way when that commits."""
    b = bench(batch=BATCH)
    await watch_claims(b)
    connection = await _connect(b)
    try:
        transaction = connection.transaction()
        await transaction.start()
        await connection.execute(
            'INSERT INTO inbox (key, partition_id, "offset", payload_hash) VALUES ($1, 0, 0, $2)',
            b.key_of("m250"),
            _crc({"what": "w250"}),
        )
        b.send(numbered(0, 500))
        async with b.running():
            await _waiting(b)
            await transaction.commit()
            await b.done()
    finally:
        await connection.close()
    assert said(b) == await b.effects() == words(range(250), range(251, 500))


async def _waiting(bench: Bench) -> None:
    query = """SELECT count(*) FROM pg_stat_activity
               WHERE datname = current_database() AND wait_event_type = 'Lock' AND query ~ 'inbox'"""

    async def somebody_waits() -> bool:
        return bool((await bench.rows(query))[0]["count"])

    await bench.until(somebody_waits, "somebody waits for a key")


async def _connect(bench: Bench) -> asyncpg.Connection[asyncpg.Record]:
    return await asyncpg.connect(bench.database)


def _crc(value: object) -> int:
    checksum = zlib.crc32(json.dumps(value).encode())
    return checksum if checksum < 2**31 else checksum - 2**32


async def test_a_replay_of_what_is_done_claims_nothing_record_by_record(bench: MakeBench) -> None:
    b = bench(batch=BATCH)
    b.send(numbered(0, 400))
    await b.run_until_done()
    await watch_claims(b)
    arguments = ("replay", "start", str(b.config), "--all", "--execute", "-o", "json")
    done = await processor_beside(PROJECT, *arguments)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["skipped"] == 400
    assert await claims(b) == [], "not even in vain"
