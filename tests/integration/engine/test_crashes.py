"""After a death: the next owner tells what it is about to try, in pieces first, and one by one where it was bad."""

from __future__ import annotations

from collections import Counter
from typing import Any

import asyncpg
import pytest

from processor import Database, Messages
from processor.engine.crashes import PIECE
from processor.messages.message import Partition
from processor.messages.positions import Log
from processor.postgres.ledger import Ledger
from tests.integration.conftest import MakeBench
from tests.support import handlers, sql
from tests.support.bench import Bench, Sent

PER_PARTITION = 2 * PIECE + 22
PARTITIONS = 2


class Seen:
    """What the ledger said was being tried when the handler was called: by partition, as [from, to)."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[str], dict[int, tuple[int, int]]]] = []

    @property
    def sizes(self) -> list[int]:
        return [len(ids) for ids, _ in self.calls]


def watch(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Seen:
    seen = Seen()

    async def meet(messages: Messages[Any], db: Database) -> None:
        rows = await bench.rows("SELECT partition, lower(in_progress) AS first, upper(in_progress) AS next FROM ledger")
        told = {row["partition"]: (row["first"], row["next"]) for row in rows if row["first"] is not None}
        seen.calls.append((list(messages.ids), told))

    monkeypatch.setattr(handlers, "meet", meet)
    return seen


async def after_a_death(bench: Bench, suspect: str | None = None) -> None:
    """As an owner leaves it that has died of its first batch."""
    bench.send([Sent({"what": "before"}, b"k", id=f"before{p}", partition=p) for p in range(PARTITIONS)])
    await bench.run_until_done()
    await bench.execute("UPDATE ledger SET unfinished_owners = 1")
    if suspect is not None:
        await bench.execute(f"UPDATE ledger SET suspects = '{suspect}', deaths = 1 WHERE partition = 1")
    bench.send(
        Sent({"what": f"w{p}.{n}"}, b"k", id=f"{p}.{n}", partition=p)
        for p in range(PARTITIONS)
        for n in range(1, PER_PARTITION + 1)  # which is its offset
    )


async def test_records_behind_a_death_are_tried_in_pieces_that_the_ledger_knows(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench({"T": "by_column"}, partitions=PARTITIONS, batch={"max_messages": 1000})
    await after_a_death(b)
    seen = watch(b, monkeypatch)
    await b.run_until_done()
    assert sum(seen.sizes) == PARTITIONS * PER_PARTITION
    assert max(seen.sizes) == PIECE
    assert len(seen.calls) < sum(seen.sizes) / 8, "one death must not make everything slow"
    for ids, told in seen.calls:
        offsets = [int(id_.split(".")[1]) for id_ in ids]
        partition = int(ids[0].split(".")[0])
        assert told == {partition: (offsets[0], offsets[-1] + 1)}, "just these, and of no other partition"
    assert sql.value(b.database, "SELECT count(*) FROM ledger WHERE in_progress IS NOT NULL") == 0


async def test_records_of_a_piece_that_was_deadly_are_tried_one_by_one(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench({"T": "by_column"}, partitions=PARTITIONS, batch={"max_messages": 1000})
    await after_a_death(b, suspect="[70,76)")
    seen = watch(b, monkeypatch)
    await b.run_until_done()
    alone = [ids[0] for ids, _ in seen.calls if len(ids) == 1]
    assert [id_ for id_ in alone if id_.startswith("1.")] == [f"1.{n}" for n in range(70, 76)]
    assert len(seen.calls) < sum(seen.sizes) / 8, "the others are not"
    assert Counter(row["status"] for row in (await b.inbox()).values()) == {
        "completed": PARTITIONS * (PER_PARTITION + 1)
    }


async def test_suspects_that_have_come_through_are_history(bench: MakeBench) -> None:
    """As long as there are some, every record of the partition is looked at."""
    b = bench({"T": "by_column"}, partitions=PARTITIONS, batch={"max_messages": 1000})
    await after_a_death(b, suspect="[70,76)")
    for _ in ("this owner", "the next one"):
        async with b.running():
            ours = b.engines[0].parts.partitions
            await b.until(lambda: [p.recovered for p in ours.owned()] == [True] * PARTITIONS, "recovered")  # noqa: B023
            await b.done()
            assert [p.crashes.suspects for p in ours.owned()] == [None] * PARTITIONS
    assert sql.value(b.database, "SELECT count(*) FROM ledger WHERE suspects IS NOT NULL OR deaths > 0") == 0


async def test_who_lives_on_is_not_counted_as_dead(bench: MakeBench) -> None:
    """A connection that broke while a record was at work, and the way back from that."""
    b = bench()
    connection = await asyncpg.connect(b.database)
    ledger, partition = Ledger(b.consumer, "us"), Partition(b.input, 0)
    await ledger.create(connection, partition, 1, 0, Log("topic id", 0, 0), 0)
    for epoch in (1, 2):
        await ledger.mark_in_progress(connection, partition, epoch, range(5, 6))
        row = (await ledger.raise_epochs(connection, {partition: 0}, 0, alive={partition}))[partition]
        assert (row.epoch, row.suspects, row.deaths) == (epoch + 1, None, 0)
    for epoch in (3, 4):
        await ledger.mark_in_progress(connection, partition, epoch, range(5, 6))
        row = (await ledger.raise_epochs(connection, {partition: 0}, 0))[partition]
        assert (row.epoch, row.suspects, row.deaths) == (epoch + 1, range(5, 6), epoch - 2)
    await connection.close()
