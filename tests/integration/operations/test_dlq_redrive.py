"""`processor dlq redrive` on real rows and a real topic: what it sends, and what it reports of the outcome."""

from __future__ import annotations

import asyncio
import base64
import json
import signal
import subprocess

import asyncpg
import orjson

from processor import Reject, Retry
from processor.messages import identity
from processor.operations import redrive as operation
from processor.postgres import dead_letters, redrive
from tests.integration.conftest import MakeBench
from tests.support import command, handlers, sql
from tests.support.bench import Sent
from tests.support.deployments import PROJECT
from tests.support.shop import Shop, headers, on_terminal, redrive_id, sent_ids
from tests.support.waiting import eventually


def test_redrive_sends_the_record_as_it_came_and_marks_the_row(shop: Shop) -> None:
    binary = {"base64": base64.b64encode(b"\xff\x00\xfe").decode()}
    stored = [["type", "T"], ["twice", "1"], ["twice", "2"], ["bin", binary], ["none", None], ["empty", ""]]
    shop.row("full", 5, key=b"\x00\xffk", payload=b"\x00\x01\xff", headers=stored)
    shop.row("null", 3, key=None, payload=None)
    shop.row("empty", 4, key=b"", payload=b"")
    shop.row("ünï", 1, partition=1, payload="ö".encode())
    done = shop.dlq("redrive", "--all", "--no-wait")
    assert (done.returncode, done.stdout) == (0, "4 sent\n"), done.stderr

    sent = [(m.partition(), redrive_id(m), m.key(), m.value()) for m in shop.records()]
    assert [one for one in sent if one[0] == 0] == [
        (0, f"{shop.consumer}:null", None, None),
        (0, f"{shop.consumer}:empty", b"", b""),
        (0, f"{shop.consumer}:full", b"\x00\xffk", b"\x00\x01\xff"),
    ]
    assert [one for one in sent if one[0] == 1] == [(1, f"{shop.consumer}:ünï", b"k", "ö".encode())]
    (full,) = [m for m in shop.records() if m.value() == b"\x00\x01\xff"]
    assert headers(full)[:-1] == [
        ("type", b"T"),
        ("twice", b"1"),
        ("twice", b"2"),
        ("bin", b"\xff\x00\xfe"),
        ("none", None),
        ("empty", b""),
    ]
    row = shop.stored("full")
    assert row["status"] == "failed"
    assert row["redriven_at"] is not None
    events = orjson.loads(row["history"])
    assert [event["event"] for event in events] == ["failed", "redriven"]
    assert events[1]["offset"] == 2
    assert "@" in events[1]["by"]


def test_what_was_sent_is_sent_once_more_only_if_asked(shop: Shop) -> None:
    shop.row("a", 1)
    shop.row("b", 2, type_="B")
    assert shop.send("--type", "T")["sent"] == 1
    assert shop.send("--all")["sent"] == 1
    none = shop.send("--all")
    assert (none["sent"], none["sent_before"]) == (0, 2)
    assert "--again" in shop.dlq("redrive", "--all").stdout
    assert [outcome["sent"] for outcome in shop.lines("redrive", "--id", "a", "--again", "--no-wait")] == [1]
    assert sent_ids(shop) == ["a", "b", "a"]


def test_id_that_may_stand_for_two_messages_sends_neither_until_the_type_is_named(shop: Shop) -> None:
    shop.identify(scope_by_type=True)
    shop.row("T:A", 1)
    shop.row("U:A", 2, type_="U")
    shop.row("U:B", 3, type_="U")
    for dry in ([], ["--dry-run"]):
        done = shop.dlq("redrive", "--id", "A", "--id", "B", *dry)
        assert (done.returncode, done.stdout) == (1, "")
        assert "2 messages with the id 'A': 'T:A', 'U:A'" in done.stderr
    assert shop.records() == []
    found = shop.json("redrive", "--id", "A", "--type", "U", "--dry-run")
    assert [message["id"] for message in found["messages"]] == ["U:A"]
    assert shop.send("--id", "A", "--id", "B", "--type", "U")["sent"] == 2
    assert shop.send("--id", "T:A")["sent"] == 1
    assert sent_ids(shop) == ["U:A", "U:B", "T:A"]


def test_collision_under_a_scoped_id_is_let_through_by_the_id_that_its_producer_gave(shop: Shop) -> None:
    shop.identify(scope_by_type=True)
    shop.row("T:A~orders:id:0:1", 1, error={"reason": "collision"})
    id_ = "A~orders:id:0:1"
    assert [shop.send("--id", id_, *more)["sent"] for more in ((), ("--despite-collision",))] == [0, 1]
    assert sent_ids(shop) == [f"T:{id_}"]


def test_limit_counts_over_all_partitions(shop: Shop) -> None:
    for offset in range(3):
        shop.row(f"p0-{offset}", offset)
        shop.row(f"p1-{offset}", offset, partition=1)
    assert shop.send("--all", "--limit", "4")["sent"] == 4
    assert sorted(sent_ids(shop)) == ["p0-0", "p0-1", "p0-2", "p1-0"]
    assert shop.send("--all", "--limit", "4")["sent"] == 2


def test_dry_run_changes_nothing(shop: Shop) -> None:
    shop.row("a", 1)
    shop.row("b", 2, status="parked", parked_key=b"k")
    before = sql.fetch(shop.database, "SELECT *, xmin FROM inbox ORDER BY key")
    done = shop.dlq("redrive", "--all", "--dry-run")
    assert done.returncode == 0
    assert [line.split("\t")[1] for line in done.stdout.splitlines()] == ["a", "b"]
    found = shop.json("redrive", "--all", "--dry-run")
    assert (found["total"], [message["id"] for message in found["messages"]]) == (2, ["a", "b"])
    assert shop.lines("redrive", "--all", "--dry-run") == found["messages"]
    assert sql.fetch(shop.database, "SELECT *, xmin FROM inbox ORDER BY key") == before
    assert shop.records() == []


def test_many_messages_go_page_by_page_in_order(shop: Shop) -> None:
    number = dead_letters.PAGE_ROWS + 2 * operation.CHUNK_ROWS + 1
    shop.many(number)
    assert shop.send("--all")["sent"] == number
    assert [m.value() for m in shop.records()] == [f"m{n}".encode() for n in range(number)]
    assert shop.redriven() == number


def test_redrive_killed_in_the_middle_and_run_again_loses_nothing(shop: Shop) -> None:
    shop.many(200)
    process = shop.start("redrive", "--all", "--rate", "40")
    eventually(shop.redriven, 30, "first message marked")
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    marked = shop.redriven()
    assert 0 < marked < 200
    assert shop.send("--all")["sent"] == 200 - marked
    records = sent_ids(shop)
    assert set(records) == {f"m{n}" for n in range(200)}
    assert records.index("m0") == 0
    assert shop.redriven() == 200
    assert shop.send("--all")["sent"] == 0


def test_interrupted_redrive_marks_what_it_sent_and_says_how_far_it_got(shop: Shop) -> None:
    shop.many(200)
    process = shop.start("redrive", "--all", "--rate", "40")
    eventually(shop.redriven, 30, "first message marked")
    process.send_signal(signal.SIGINT)
    stdout, _ = process.communicate(timeout=30)
    assert process.returncode == 130
    marked = shop.redriven()
    assert stdout == f"interrupted: {marked} of 200 sent and marked; run the command again for the rest\n"
    assert len(shop.records()) == marked


def test_a_topic_that_is_gone_is_reported_before_anything_is_sent(shop: Shop) -> None:
    shop.row("a", 1)
    sql.execute(shop.database, "UPDATE ledger SET partition = 7 WHERE partition_id = $1", shop.sources[0])
    done = shop.dlq("redrive", "--all")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "does not exist any more" in line
    assert shop.redriven() == 0


def test_brokers_that_do_not_answer_are_named_in_one_line(shop: Shop) -> None:
    shop.row("a", 1)
    done = shop.dlq("redrive", "--all", PROCESSOR_KAFKA__BOOTSTRAP_SERVERS="127.0.0.1:1")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("error: kafka.bootstrap_servers: the brokers do not answer")


async def test_row_that_the_service_failed_again_in_the_meantime_does_not_count_as_sent(shop: Shop) -> None:
    """The service may be faster than the delivery report; marked then, the row would be passed over for ever."""
    shop.row("a", 1)
    ours = await asyncpg.connect(shop.database)
    theirs = await asyncpg.connect(shop.database)
    try:
        (row,) = await ours.fetch(redrive.LOAD, [identity.inbox_key(shop.consumer)("a").hex()])
        transaction = theirs.transaction()
        await transaction.start()
        await theirs.execute("UPDATE inbox SET attempts = attempts + 1, redriven_at = NULL WHERE message_id = 'a'")
        marking = asyncio.create_task(
            ours.execute(redrive.MARK, [row["key"]], [row["version"]], ['{"event": "redriven"}'])
        )
        blocked = "SELECT count(*) FROM pg_stat_activity WHERE pid = $1 AND wait_event_type = 'Lock'"
        pid = ours.get_server_pid()
        await asyncio.to_thread(eventually, lambda: sql.value(shop.database, blocked, pid), 30, "the mark waits")
        await transaction.commit()
        await marking
    finally:
        await ours.close()
        await theirs.close()
    after = shop.stored("a")
    assert after["redriven_at"] is None
    assert orjson.loads(after["history"])[-1] == {"event": "redriven"}


async def test_redrive_says_how_many_were_completed_and_how_many_failed_again(bench: MakeBench) -> None:
    b = bench()
    handlers.failing |= {"m0", "m1"}
    b.send([Sent({"what": f"m{n}"}, id=f"m{n}") for n in range(2)])
    async with b.running():
        await b.done()
        handlers.failing.remove("m0")
        done = await command.processor_beside(PROJECT, "dlq", "redrive", str(b.config), "--all")
        assert (done.returncode, done.stdout) == (1, "2 sent: 1 completed, 1 failed again\n"), done.stderr
        assert "failed again: m1; processor dlq show" in done.stderr
        handlers.failing.clear()
        done = await command.processor_beside(PROJECT, "dlq", "redrive", str(b.config), "--id", "m1", "--json")
        printed = json.loads(done.stdout)
    assert done.returncode == 0
    assert (printed["ok"], printed["sent"], printed["completed"], printed["failed_again"]) == (True, 1, 1, [])
    assert await b.effects() == ["m0", "m1"]


async def test_redrive_waits_for_a_message_that_is_tried_several_times(bench: MakeBench) -> None:
    b = bench("planned", retry={"attempts": 3})
    handlers.plans["m"] = iter([Reject("at first"), Retry("", after=0.3), Retry("", after=0.3)])
    b.send([Sent({"what": "m"}, id="m")])
    async with b.running():
        await b.done()
        done = await command.processor_beside(PROJECT, "dlq", "redrive", str(b.config), "--all")
    assert (done.returncode, done.stdout) == (0, "1 sent: 1 completed, 0 failed again\n"), done.stderr
    assert handlers.calls["m"] == 4


def test_redrive_without_a_service_waits_no_longer_than_its_timeout_and_not_at_all_with_no_wait(shop: Shop) -> None:
    shop.row("a", 1)
    shop.row("b", 2)
    done = shop.dlq("redrive", "--id", "a", "--timeout", "0.5")
    assert (done.returncode, done.stdout) == (1, "1 sent: 0 completed, 0 failed again, 1 not processed yet\n")
    assert "nothing has moved for 0.5 s" in done.stderr
    done = shop.dlq("redrive", "--id", "b", "--no-wait")
    assert (done.returncode, done.stdout) == (0, "1 sent\n")


async def test_collision_is_redriven_only_by_name_and_if_the_operator_says_that_it_is_one(bench: MakeBench) -> None:
    b = bench()

    async def redrive(*arguments: str) -> subprocess.CompletedProcess[str]:
        return await command.processor_beside(PROJECT, "dlq", "redrive", str(b.config), *arguments)

    (*_, second, third) = b.send([Sent({"what": what}, id="m") for what in ("one", "two", "three")])
    collisions = [f"m~{b.place(place.offset)}" for place in (second, third)]
    async with b.running():
        await b.done()
        for choice in (("--all",), ("--reason", "collision"), ("--id", collisions[0])):
            done = await redrive(*choice)
            assert (done.returncode, done.stdout) == (0, "nothing to send: no other failed or parked message matches\n")
            assert f"left alone: {1 if choice[0] == '--id' else 2} with the id of another message" in done.stderr
        done = await redrive("--all", "--despite-collision")
        assert done.returncode == 2
        assert await b.effects() == ["one"]
        done = await redrive("--id", collisions[0], "--despite-collision")
        assert (done.returncode, done.stdout) == (0, "1 sent: 1 completed, 0 failed again\n"), done.stderr
        await b.done()
    assert await b.effects() == ["one", "two"]
    rows = await b.inbox()
    assert {id_: row["status"] for id_, row in rows.items()} == {
        "m": "completed",
        collisions[0]: "completed",
        collisions[1]: "failed",
    }


def test_on_a_terminal_there_are_a_table_and_a_progress_bar(shop: Shop) -> None:
    shop.many(5)
    code, shown = on_terminal(shop, "", "list")
    assert code == 0
    assert "┏━━━━┳" in shown
    assert "\x1b[31mfailed" in shown
    code, shown = on_terminal(shop, "", "redrive", "--all", "--no-wait")
    assert (code, shop.redriven()) == (0, 5)
    assert "5/5" in shown
    assert shown.rstrip().endswith("5 sent")
