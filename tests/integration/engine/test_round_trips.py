"""How often a batch waits for Postgres, by handler form: counts that do not depend on the machine.

Each is exact: one round trip more in every batch is a millisecond more where Postgres is a millisecond away.
"""

from __future__ import annotations

from typing import Any

import pytest

from processor import Database, Message, Messages, Output, Outputs, Result
from processor.postgres.claims import COPY_FROM
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.handlers import COLLECT, INSERT
from tests.support.logs import events

BATCH = {"max_messages": 500, "linger_ms": 300}
# What every batch waits for, whether its claim goes by COPY or by INSERT. While full batches follow each other, it
# begins in the round trip that commits the one before.
FOLLOWING = {"claim": 1, "ledger": 1, "commit": 1}
FIXED = {"begin": 1} | FOLLOWING
MOST = 6


async def arrays(messages: Messages[Any], db: Database) -> Outputs:
    await db.execute(COLLECT, [value["what"] for value in messages.values])
    await db.execute("UPDATE effects SET what = what WHERE what = ANY ($1::text[])", messages.ids)
    return Outputs(handlers.output_topic, messages.values)


async def nothing(messages: Messages[Any], db: Database) -> None: ...


async def write(message: Message[Any], db: Database) -> Output:
    db.write(INSERT, message.value["what"])
    return Output(handlers.output_topic, message.value)


async def collect(message: Message[Any], db: Database) -> None:
    db.collect(COLLECT, message.value["what"])


async def execute(message: Message[Any], db: Database) -> None:
    await db.execute(INSERT, message.value["what"])


async def read_and_write(message: Message[Any], db: Database) -> None:
    await db.fetchrow("SELECT FROM effects WHERE what = $1 LIMIT 1", message.id)
    db.write(INSERT, message.value["what"])


async def answer(message: Message[Any], db: Database) -> Result:
    return Result({"what": message.value["what"]})


def numbered(start: int, stop: int) -> list[Sent]:
    return [Sent({"what": f"w{n}"}, id=f"m{n}", key=f"k{n}".encode()) for n in range(start, stop)]


async def batches(bench: Bench, logs: list[Any], sent: list[Sent]) -> list[tuple[int, dict[str, int]]]:
    """The size and the round trips of each batch when nothing is left to be prepared."""
    async with bench.running():
        for warming_up in (numbered(0, 2), numbered(2, 2 + 2 * COPY_FROM)):
            bench.send(warming_up)
            await bench.done()
        before = len(events(logs, "batch_committed"))
        bench.send(sent)
        await bench.done()
    return [(event["records"], event["round_trips"]) for event in events(logs, "batch_committed")[before:]]


@pytest.mark.parametrize(
    ("handler", "of_handler"),
    [
        (arrays, {"handlers": 2}),
        (nothing, {}),
        (write, {"writes": 1}),
        (collect, {"writes": 1}),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
async def test_round_trips_of_a_batch_are_as_few_as_its_statements(
    bench: MakeBench, logs: list[Any], handler: Any, of_handler: dict[str, int]
) -> None:
    b = bench(f"{__name__}:{handler.__name__}", batch=BATCH)
    found = await batches(b, logs, numbered(1000, 3000))
    assert all(trips in (FIXED | of_handler, FOLLOWING | of_handler) for _, trips in found), found
    assert sum(records >= COPY_FROM for records, _ in found) >= 4
    assert max(sum(trips.values()) for _, trips in found) <= MOST


async def test_few_records_are_claimed_in_one_round_trip(bench: MakeBench, logs: list[Any]) -> None:
    b = bench(f"{__name__}:write", batch=BATCH)
    found = await batches(b, logs, numbered(1000, 1001))
    assert found == [(1, FIXED | {"writes": 1})]


@pytest.mark.parametrize(("handler", "extra"), [(execute, {}), (read_and_write, {"writes": 0})])
async def test_handlers_that_wait_make_a_round_trip_for_every_wait(
    bench: MakeBench, logs: list[Any], handler: Any, extra: dict[str, int]
) -> None:
    b = bench(f"{__name__}:{handler.__name__}", batch=BATCH)
    found = await batches(b, logs, numbered(1000, 1300))
    for records, trips in found:
        # A read sends what was queued before it; the last write goes at the end.
        assert {"begin": 1} | trips == FIXED | {"handlers": records} | dict.fromkeys(extra, records)


async def test_results_are_kept_in_one_round_trip(bench: MakeBench, logs: list[Any]) -> None:
    b = bench(f"{__name__}:answer", batch=BATCH)
    found = await batches(b, logs, numbered(1000, 2000))
    assert [trips["keep"] for _, trips in found] == [1] * len(found)


async def test_first_batch_prepares_and_what_is_prepared_stays(bench: MakeBench, logs: list[Any]) -> None:
    b = bench(f"{__name__}:execute", batch=BATCH)
    async with b.running():
        for n in range(3):
            b.send(numbered(n, n + 1))
            await b.done()
    first, *later = [event["round_trips"] for event in events(logs, "batch_committed")]
    statements = ["the claim's", "the handler's", "the ledger's"]
    assert first["prepare"] == len(statements)
    assert later == [FIXED | {"handlers": 1}] * 2


async def test_known_key_makes_a_large_batch_begin_anew_and_that_is_counted(bench: MakeBench, logs: list[Any]) -> None:
    b = bench(f"{__name__}:nothing", batch=BATCH)
    found = await batches(b, logs, [*numbered(1000, 1400), *numbered(0, 1)])
    again = [trips for _, trips in found if trips["claim"] > 1]
    assert all(trips["begin"] <= 2 and trips["claim"] <= 3 for trips in again), "COPY, then INSERT and a look-up"
    assert len(again) == 1


async def test_progress_says_what_all_batches_waited_for(bench: MakeBench, logs: list[Any]) -> None:
    b = bench(f"{__name__}:write", batch=BATCH)
    await batches(b, logs, numbered(1000, 2000))
    (engine,) = b.engines
    committed = events(logs, "batch_committed")
    total = engine._counters.progress().round_trips
    assert total == {
        purpose: sum(event["round_trips"].get(purpose, 0) for event in committed)
        for purpose in ("begin", "claim", "prepare", "writes", "ledger", "commit")
    }
