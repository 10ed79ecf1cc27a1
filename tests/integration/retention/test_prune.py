"""What goes from the inbox, and what stays: nothing that can still come is forgotten."""

from __future__ import annotations

from pathlib import Path

import asyncpg
import pytest

from processor.kafka import cluster
from processor.kafka.cluster import Cluster
from processor.retention.round import Hand
from processor.retention.survey import Held
from processor.settings.load import load
from tests.integration.conftest import MakeBench
from tests.integration.retention.conftest import age, age_notes, offsets, prune, refused
from tests.support import command
from tests.support.bench import Sent
from tests.support.offsets import set_offset


def sent(*numbers: int, partition: int = 0) -> list[Sent]:
    return [Sent({"what": f"w{n}"}, id=f"m{n}", partition=partition) for n in numbers]


async def test_only_rows_whose_time_is_over_go_and_a_dry_run_changes_nothing(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(*range(40)))
    await b.run_until_done()
    await age(b, 8, '"offset" < 25')
    await age(b, 6.5, '"offset" >= 25')
    counted = await prune(b, "--dry-run")
    assert (counted["would_delete"], counted["complete"]) == (25, True)
    assert await b.rows("SELECT FROM log_ends") == await b.rows("SELECT FROM pruning") == []
    assert len(await offsets(b)) == 40
    done = await prune(b)
    assert (done["deleted"], done["complete"], done["archive"]) == (25, True, None)
    assert await offsets(b) == list(range(25, 40))
    assert (await prune(b))["deleted"] == 0


async def test_hours_instead_of_days(bench: MakeBench) -> None:
    b = bench(retention={"hours": 2})
    b.send(sent(*range(4)))
    await b.run_until_done()
    await age(b, 3 / 24, '"offset" < 2')
    await age(b, 1.9 / 24, '"offset" >= 2')
    assert (await prune(b))["deleted"] == 2


@pytest.mark.parametrize("status", ["pending", "processing", "failed", "parked", "discarded"])
async def test_what_is_not_done_stays_and_so_does_what_an_operator_gave_up(bench: MakeBench, status: str) -> None:
    b = bench()
    b.send(sent(0, 1))
    await b.run_until_done()
    await b.execute(f"UPDATE inbox SET status = '{status}' WHERE \"offset\" = 0")
    await age(b, 400)
    assert (await prune(b))["deleted"] == 1
    assert await offsets(b) == [0]


async def test_rows_of_other_consumers_stay(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 1, 2))
    await b.run_until_done()
    await b.execute(
        """INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions, first_offset, next_offset,
                                owner) VALUES ('another', 'in', 0, 1, 'id', 1, 100, 100, 'me')""",
        """INSERT INTO inbox (key, partition_id, "offset", payload_hash)
           SELECT gen_random_uuid(), partition_id, 7, 0 FROM ledger WHERE consumer = 'another'""",
    )
    await age(b, 30)
    assert (await prune(b))["deleted"] == 3
    assert await offsets(b) == [7]


async def test_a_message_that_came_again_is_remembered_from_then_on(bench: MakeBench) -> None:
    """Even if the repetition came in another partition: a rewind there must find it."""
    b = bench(partitions=2)
    b.send(sent(0, 1, 2))
    await b.run_until_done()
    await age(b, 8)
    b.send(sent(0, 1, partition=1))
    await b.run_until_done()
    assert (await prune(b))["deleted"] == 1
    assert await offsets(b) == [0, 1]
    assert len(await b.effects()) == 3


async def test_a_redelivery_does_not_count_as_seen_again(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 1, 2))
    await b.run_until_done()
    await age(b, 8)
    set_offset(b, 0)
    await b.run_until_done()
    assert await b.rows("SELECT FROM inbox WHERE seen_again_at IS NOT NULL") == []
    assert (await prune(b))["deleted"] == 3


async def test_nothing_at_or_above_the_committed_offset_goes_however_old_it_is(bench: MakeBench) -> None:
    """An operator has moved the offset back, and the service has not started yet."""
    b = bench()
    b.send(sent(*range(10)))
    await b.run_until_done()
    await age(b, 40)
    set_offset(b, 6)
    assert "records wait, and nobody noted when they arrived" in await refused(b)
    # With a note from when the log ended there.
    await b.execute("""INSERT INTO log_ends SELECT partition_id, now() - interval '20 days', 6 FROM ledger""")
    assert (await prune(b))["deleted"] == 6
    assert await offsets(b) == [6, 7, 8, 9]
    await b.run_until_done()
    assert len(await b.effects()) == 10


async def test_a_consumer_that_was_down_for_longer_than_the_retention_finds_all_ids_that_can_still_come(
    bench: MakeBench,
) -> None:
    b = bench()
    b.send(sent(*range(20)))
    await b.run_until_done()
    await prune(b)  # it notes where the log ends
    # Then the consumer was down for ten days.
    await age(b, 12, '"offset" < 10')
    await age(b, 20, '"offset" >= 10')
    await age_notes(b, 10)
    b.send(sent(0, 5, 9))  # a producer's duplicates, a few days after the consumer went down
    assert (await prune(b))["deleted"] == 10
    assert await offsets(b) == list(range(10)), "days older than the retention, but their duplicates are still to come"
    await b.run_until_done()
    assert len(await b.effects()) == 20
    # Up to date again, it forgets what nobody has seen since.
    assert (await prune(b))["deleted"] == 7
    assert await offsets(b) == [0, 5, 9]


async def test_one_partition_that_lags_holds_up_all_for_a_duplicate_may_be_in_any(bench: MakeBench) -> None:
    b = bench(partitions=2)
    b.send(sent(*range(4)) + sent(10, partition=1))
    await b.run_until_done()
    await age(b, 30)
    set_offset(b, 0, partition=1)
    assert "[1]: records wait" in await refused(b)
    assert len(await offsets(b)) == 5


async def test_what_an_unfinished_replay_needs_stays(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(*range(10)))
    await b.run_until_done()
    await age(b, 30)
    await b.execute(
        f"""INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions, first_offset, next_offset,
                                owner)
            SELECT '{b.consumer}.replay.r', topic, partition, 1, topic_id, 1, 3, 3, 'me' FROM ledger""",
        f"INSERT INTO replays (consumer, name, plan) VALUES ('{b.consumer}', 'r', '{{\"mode\": \"missing\"}}')",
        f"""INSERT INTO replay_ranges (partition_id, consumer, name, live_partition_id, first_offset, end_offset,
                                       applied_below, silent_below)
            SELECT own.partition_id, '{b.consumer}', 'r', live.partition_id, 3, 8, 8, 8 FROM ledger own, ledger live
            WHERE own.consumer <> live.consumer AND live.consumer = '{b.consumer}'""",
    )
    assert "records wait" in await refused(b)
    await b.execute("UPDATE ledger SET next_offset = 8 WHERE next_offset = 3")
    assert (await prune(b))["deleted"] == 10


async def test_partition_that_was_added_and_nobody_reads_yet_holds_up_all(bench: MakeBench) -> None:
    b = bench(partitions=2)
    b.send(sent(0, 1) + sent(2, partition=1))
    await b.run_until_done()
    await age(b, 30)
    await b.execute("DELETE FROM ledger WHERE partition = 1")
    assert "this consumer has not begun to read it" in await refused(b)


async def test_topic_that_was_created_anew_holds_up_all_until_an_operator_has_decided(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 1))
    await b.run_until_done()
    await age(b, 30)
    await b.execute("UPDATE ledger SET topic_id = 'another'")
    assert "processor topic-recreated" in await refused(b)


async def test_notes_of_where_logs_end_are_few_while_everything_is_held_up(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 1))
    await b.run_until_done()
    set_offset(b, 0)
    for _ in range(2):
        assert "records wait" in await refused(b)
    noted = "SELECT partition_id FROM log_ends"
    assert len(await b.rows(noted)) == 1
    await age_notes(b, 1)
    assert "records wait" in await refused(b)
    assert len(await b.rows(noted)) == 2
    await b.run_until_done()
    await b.execute("INSERT INTO log_ends VALUES (1000, now(), 5)", "UPDATE ledger SET former = ARRAY[1000]")
    await prune(b)
    assert 1000 not in {row["partition_id"] for row in await b.rows(noted)}


async def test_rows_of_a_topic_that_is_gone_go_too(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 1, 2))
    await b.run_until_done()
    await b.execute("UPDATE ledger SET former = ARRAY[1000]", "UPDATE inbox SET partition_id = 1000 WHERE true")
    await age(b, 8)
    assert (await prune(b))["deleted"] == 3


async def test_without_brokers_nothing_goes(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster, "TIMEOUT_SECONDS", 0.5)
    b = bench()
    b.send(sent(0))
    await b.run_until_done()
    await age(b, 30)
    brokers = Cluster(load(b.config, {"PROCESSOR_KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}).kafka, b.consumer)
    try:
        connection = await asyncpg.connect(b.database)
        assert isinstance(await Hand(load(b.config, {}), connection, brokers).go_round(), Held)
        await connection.close()
    finally:
        brokers.close()
    assert await offsets(b) == [0]


async def test_retention_that_is_off_has_nothing_to_prune(bench: MakeBench) -> None:
    b = bench(retention={"days": 0})
    b.send(sent(0))
    await b.run_until_done()
    done = await command.processor_beside(Path.cwd(), "prune", str(b.config))
    assert (done.returncode, done.stderr) == (
        2,
        f"error: {b.config}: retention.days: is 0, so the inbox keeps everything\n",
    )
