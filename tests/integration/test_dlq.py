"""`processor dlq` on real rows and a real topic; what the service would do is done here by hand."""

from __future__ import annotations

import asyncio
import base64
import fcntl
import json
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import asyncpg
import orjson
import pytest
from confluent_kafka import Consumer, Message, TopicPartition

from processor import Reject, Retry
from processor.messages import identity
from processor.operations import dead_letters
from processor.operations.dead_letters import Filter
from tests.conftest import Topics, unique
from tests.integration.conftest import MakeBench
from tests.support import command, handlers, sql
from tests.support.bench import Sent
from tests.support.deployments import PROJECT, write
from tests.support.servers import Servers
from tests.support.waiting import eventually

NOW = datetime.now(UTC)
READ_SECONDS = 30.0

INSERT = """
    INSERT INTO inbox (key, source, "offset", payload_hash, status, message_id, type, record_key, payload, headers,
                       error, finished_at, first_failed_at, parked_key, attempts, history)
    VALUES (inbox_key($1, $2), $3, $4, 0, $5::text::inbox_status, $2, $6, $7, $8, $9, $10, $11, $11, $12, 2, $13)
"""
FAILED = [{"at": "2025-01-01T00:00:00+00:00", "event": "failed", "class": "poison", "reason": "rejected"}]


@dataclass
class Shop:
    """A deployment with partitions in its ledger, and rows as the engine leaves them."""

    folder: Path
    consumer: str
    topic: str
    database: str
    bootstrap_servers: str
    sources: list[int]
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def row(
        self,
        message_id: str,
        offset: int,
        *,
        partition: int = 0,
        status: str = "failed",
        type_: str | None = "T",
        key: bytes | None = b"k",
        payload: bytes | None = b"{}",
        headers: list[Any] | None = None,
        error: dict[str, Any] | None = None,
        at: datetime = NOW,
        parked_key: bytes | None = None,
    ) -> None:
        error = {"class": "poison", "reason": "rejected", "message": "no", "traceback": None} | (error or {})
        failed = status != "parked"
        sql.execute(
            self.database,
            INSERT,
            self.consumer,
            message_id,
            self.sources[partition],
            offset,
            status,
            type_,
            key,
            payload,
            json.dumps(headers or []),
            json.dumps(error) if failed else None,
            at if failed else None,
            parked_key,
            json.dumps(FAILED),
        )

    def many(self, number: int) -> None:
        sql.execute(
            self.database,
            """INSERT INTO inbox (key, source, "offset", payload_hash, status, message_id, type, record_key, payload,
                                  headers, error, finished_at)
               SELECT inbox_key($1, 'm' || n), $2, n, 0, 'failed', 'm' || n, 'T', 'k', convert_to('m' || n, 'UTF8'),
                      '[]', '{"class": "poison", "reason": "rejected"}', now()
               FROM generate_series(0, $3 - 1) n""",
            self.consumer,
            self.sources[0],
            number,
        )

    def dlq(self, verb: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return command.processor(self.folder, "dlq", verb, "shop.toml", *arguments, environ=environ)

    def json(self, verb: str, *arguments: str) -> Any:
        done = self.dlq(verb, *arguments, "--json")
        assert done.stderr == ""
        return json.loads(done.stdout)

    def send(self, *arguments: str) -> Any:
        """Redrive without a service that could take anything."""
        return self.json("redrive", *arguments, "--no-wait")

    def ids(self, *filters: str) -> list[str]:
        return [message["id"] for message in self.json("list", *filters)["messages"]]

    def start(self, verb: str, *arguments: str) -> subprocess.Popen[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "processor", "dlq", verb, "shop.toml", *arguments],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def stored(self, message_id: str) -> Any:
        (row,) = sql.fetch(self.database, "SELECT * FROM inbox WHERE message_id = $1", message_id)
        return row

    def redriven(self) -> int:
        found: int = sql.value(self.database, "SELECT count(*) FROM inbox WHERE redriven_at IS NOT NULL")
        return found

    def records(self) -> list[Message]:
        """All that is in the input topic, in the order of each partition."""
        with reading(self) as consumer:
            places = [TopicPartition(self.topic, number, 0) for number in range(len(self.sources))]
            left = sum(consumer.get_watermark_offsets(place, READ_SECONDS)[1] for place in places)
            consumer.assign(places)
            found = []
            while left:
                message = consumer.poll(READ_SECONDS)
                assert message is not None
                assert message.error() is None
                found.append(message)
                left -= 1
            return found


def reading(shop: Shop) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": shop.bootstrap_servers,
            "group.id": unique("reader"),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )


def headers(message: Message) -> list[tuple[str, bytes | None]]:
    found: Any = message.headers()  # declared as a mapping, which could not hold the same name twice
    return found or []


def redrive_id(message: Message) -> str:
    name, value = headers(message)[-1]
    assert name == "processor-redrive"
    assert value is not None
    return value.decode()


def sent_ids(shop: Shop) -> list[str]:
    return [redrive_id(message).removeprefix(f"{shop.consumer}:") for message in shop.records()]


@pytest.fixture
def shop(tmp_path: Path, stack: Servers, database: str, topics: Topics) -> Iterator[Shop]:
    consumer, topic = unique("shop"), topics("orders", partitions=2)
    tables = {
        "handlers": {"T": "shop:handle"},
        "kafka": {"bootstrap_servers": stack.bootstrap_servers},
        "database": {"url": database},
    }
    write(tmp_path / "shop.toml", {"consumer": consumer, "topic": topic}, tables)
    ledger = """
        INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions,
                             first_offset, next_offset, owner, slot)
        VALUES ($1, $2, $3, 1, 'id', 1, 0, 0, 'me', 0) RETURNING source
    """
    sources = [sql.value(database, ledger, consumer, topic, partition) for partition in (0, 1)]
    sql.value(database, ledger, "other", topic, 0)
    made = Shop(tmp_path, consumer, topic, database, stack.bootstrap_servers, sources)
    yield made
    for process in made.running:
        if process.poll() is None:
            process.kill()
        process.communicate()


# --- list and show ---


def test_filters_work_alone_and_together(shop: Shop) -> None:
    shop.row("a", 1, type_="A", key=b"k1", error={"class": "bug", "reason": "KeyError"})
    shop.row("b", 2, type_="B", key=b"k2", at=NOW - timedelta(hours=3), error={"message": "NUL \0 and \\u0000"})
    shop.row("c", 3, partition=1, key=b"\xff\x00", at=NOW - timedelta(days=2))
    shop.row("d", 4, status="parked", key=b"k1", parked_key=b"k1")
    shop.row("e", 5, status="discarded")
    shop.row("f", 6, status="pending")
    shop.row("g", 7, status="processing")
    shop.row("h", 8, status="completed")
    sql.execute(
        shop.database,
        INSERT,
        "other",
        "x",
        shop.sources[1] + 1,
        9,
        "failed",
        "A",
        b"k1",
        b"",
        "[]",
        None,
        NOW,
        None,
        "[]",
    )

    assert shop.ids() == ["a", "b", "d", "c"]
    assert shop.ids("--id", "c", "--id", "a", "--id", "x", "--id", "h") == ["a", "c"]
    assert shop.ids("--key", "k1") == ["a", "d"]
    assert shop.ids("--key-hex", "ff00") == ["c"]
    assert shop.ids("--type", "A") == ["a"]
    assert shop.ids("--class", "poison") == ["b", "c"]
    assert shop.ids("--reason", "KeyError") == ["a"]
    assert shop.ids("--error-reason", "rejected") == ["b", "c"]
    assert shop.ids("--partition", "1") == ["c"]
    assert shop.ids("--topic", shop.topic) == ["a", "b", "d", "c"]
    assert shop.ids("--topic", "elsewhere") == []
    assert shop.ids("--since", "1h") == ["a", "d"]
    assert shop.ids("--since", "1d", "--until", "1h") == ["b"]
    assert shop.ids("--until", (NOW - timedelta(days=1)).isoformat()) == ["c"]
    assert shop.ids("--key", "k1", "--class", "bug", "--partition", "0") == ["a"]
    assert shop.ids("--status", "discarded", "--status", "pending") == ["e", "f"]
    assert shop.ids("--status", "processing") == ["g"]


def test_list_is_bounded_and_says_how_many_more_there_are(shop: Shop) -> None:
    shop.many(7)
    done = shop.dlq("list", "--limit", "3")
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["id", "m0", "m1", "m2"]
    assert done.stderr.startswith("4 more")
    found = shop.json("list", "--limit", "3")
    assert (len(found["messages"]), found["total"], found["more"]) == (3, 7, 4)
    assert found["messages"][0]["key"] == "k"


def test_show_tells_everything_and_raw_gives_the_bytes(shop: Shop) -> None:
    stored = [["type", "T"], ["bin", {"base64": base64.b64encode(b"\xff\x01").decode()}], ["none", None]]
    error = {"message": "broken\x1b[31m", "traceback": "Traceback\n  line 1\nKeyError: 'x'"}
    shop.row("m 1", 17, payload=b'{"total":12}', headers=stored, error=error)
    done = shop.dlq("show", "m 1")
    assert done.returncode == 0
    for text in ("m 1", "17", '"total": 12', "bin: 0xff01", "none: null", "KeyError: 'x'", "reason=rejected", "poison"):
        assert text in done.stdout, text
    assert "\x1b" not in done.stdout
    shown = shop.json("show", "m 1")
    assert shown["payload"] == {"data": '{"total":12}', "encoding": "text"}
    assert shown["headers"] == [["type", "T", "text"], ["bin", "ff01", "hex"], ["none", None, None]]
    assert (shown["topic"], shown["partition"], shown["offset"], shown["attempts"]) == (shop.topic, 0, 17, 2)
    assert shown["history"][0]["event"] == "failed"

    binary = bytes(range(256))
    shop.row("m2", 18, payload=binary)
    raw = subprocess.run(
        [sys.executable, "-m", "processor", "dlq", "show", "shop.toml", "m2", "--raw"],
        cwd=shop.folder, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert raw.stdout == binary


def test_unknown_id_is_one_line_and_exit_1(shop: Shop) -> None:
    done = shop.dlq("show", "nobody")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "no message 'nobody'" in line


def test_database_without_tables_is_told_what_to_do(shop: Shop, empty_database: str) -> None:
    done = shop.dlq("list", PROCESSOR_DATABASE__URL=empty_database)
    assert done.returncode == 1
    assert "processor migrate" in done.stderr


# --- redrive ---


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
    assert shop.send("--id", "a", "--again")["sent"] == 1
    assert sent_ids(shop) == ["a", "b", "a"]


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
    assert sql.fetch(shop.database, "SELECT *, xmin FROM inbox ORDER BY key") == before
    assert shop.records() == []


def test_many_messages_go_page_by_page_in_order(shop: Shop) -> None:
    number = dead_letters.PAGE_ROWS + 2 * dead_letters.CHUNK_ROWS + 1
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


def test_topic_that_is_gone_is_told_before_anything_is_sent(shop: Shop) -> None:
    shop.row("a", 1)
    sql.execute(shop.database, "UPDATE ledger SET partition = 7 WHERE source = $1", shop.sources[0])
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
        (row,) = await ours.fetch(dead_letters.LOAD, [identity.inbox_key(shop.consumer)("a").hex()])
        transaction = theirs.transaction()
        await transaction.start()
        await theirs.execute("UPDATE inbox SET attempts = attempts + 1, redriven_at = NULL WHERE message_id = 'a'")
        marking = asyncio.create_task(
            ours.execute(dead_letters.MARK, [row["key"]], [row["version"]], ['{"event": "redriven"}'])
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


# --- what became of it ---


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
        told = json.loads(done.stdout)
    assert done.returncode == 0
    assert (told["ok"], told["sent"], told["completed"], told["failed_again"]) == (True, 1, 1, [])
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


def test_redrive_without_a_service_waits_no_longer_than_it_may_and_not_at_all_if_told_so(shop: Shop) -> None:
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


# --- parked keys ---


class Service:
    """Reads the input topic and does to the rows what the engine does."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._consumer = reading(shop)
        self._consumer.assign([TopicPartition(shop.topic, 0, 0)])
        self.applied: list[str] = []

    def close(self) -> None:
        self._consumer.close()

    def next(self, *, fails: bool = False) -> str:
        message = self._consumer.poll(READ_SECONDS)
        assert message is not None, "nothing was sent"
        id_ = redrive_id(message).partition(":")[2]
        head = sql.value(
            self._shop.database, 'SELECT message_id FROM inbox WHERE parked_key IS NOT NULL ORDER BY "offset" LIMIT 1'
        )
        if id_ != head:
            change = "redriven_at = NULL"
        elif fails:
            change = "status = 'failed', finished_at = now(), redriven_at = NULL"
        else:
            change = "status = 'completed', parked_key = NULL, redriven_at = NULL"
            self.applied.append(id_)
        both = f"""
            WITH gone AS (UPDATE ledger SET next_offset = $2 WHERE source = $3)
            UPDATE inbox SET {change} WHERE message_id = $1
        """
        sql.execute(self._shop.database, both, id_, (message.offset() or 0) + 1, self._shop.sources[0])
        return id_


@pytest.fixture
def service(shop: Shop) -> Iterator[Service]:
    made = Service(shop)
    yield made
    made.close()


def park(shop: Shop, *offsets: int) -> None:
    for offset in offsets:
        shop.row(f"m{offset}", offset, status="parked", parked_key=b"k")


def test_parked_key_is_sent_as_a_whole_and_followed_until_it_is_free(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4, 5)
    process = shop.start("redrive", "--id", "m4")
    assert [service.next() for _ in range(3)] == ["m3", "m4", "m5"]
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (0, "3 sent: 3 completed, 0 failed again\nfreed 1 parked key\n"), stderr
    assert service.applied == ["m3", "m4", "m5"]


def test_what_is_parked_meanwhile_is_sent_too(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4)
    process = shop.start("redrive", "--key", "k")
    assert service.next() == "m3"
    park(shop, 5, 6)
    assert [service.next() for _ in range(3)] == ["m4", "m5", "m6"]
    assert process.wait(30) == 0
    assert service.applied == ["m3", "m4", "m5", "m6"]


def test_head_that_fails_again_ends_it_and_leaves_the_rest_parked(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4)
    process = shop.start("redrive", "--key", "k")
    assert service.next(fails=True) == "m3"
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "failed again: m3" in stderr
    assert (shop.stored("m3")["status"], shop.stored("m4")["status"]) == ("failed", "parked")


def test_message_that_came_before_its_turn_is_sent_again_when_it_has_come(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4)
    assert shop.send("--key", "k")["keys_still_parked"] == 1
    assert service.next(fails=True) == "m3"
    assert service.next() == "m4", "passed over"
    process = shop.start("redrive", "--key", "k")
    assert [service.next(), service.next()] == ["m3", "m4"]
    assert process.wait(30) == 0
    assert service.applied == ["m3", "m4"]


def test_row_that_the_service_went_past_without_touching_it_is_sent_again(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    assert shop.send("--key", "k")["sent"] == 1
    assert shop.send("--key", "k")["sent"] == 0, "it is on its way"
    sql.execute(shop.database, "UPDATE ledger SET next_offset = 1 WHERE source = $1", shop.sources[0])
    assert shop.send("--key", "k")["sent"] == 1


def test_service_that_does_not_run_is_told_after_the_timeout(shop: Shop) -> None:
    shop.row("m3", 3, parked_key=b"k")
    done = shop.dlq("redrive", "--key", "k", "--timeout", "0.5")
    assert done.returncode == 1
    assert "nothing has moved for 0.5 s: the service seems not to be running" in done.stderr
    assert shop.redriven() == 1


# --- discard ---


def test_discard_keeps_who_when_and_why(shop: Shop) -> None:
    shop.row("a", 1, payload=b"evidence")
    shop.row("b", 2)
    done = shop.dlq("discard", "--id", "a", "--reason", "customer “gone”", "--by", "ada", "--yes")
    assert (done.returncode, done.stdout) == (0, "discarded 1\n"), done.stderr
    row = shop.stored("a")
    assert (row["status"], row["parked_key"], row["payload"]) == ("discarded", None, b"evidence")
    failed, discarded = orjson.loads(row["history"])
    assert failed["event"] == "failed"
    at = datetime.fromisoformat(discarded.pop("at"))
    assert NOW - timedelta(minutes=1) < at < datetime.now(UTC) + timedelta(minutes=1)
    assert discarded == {"event": "discarded", "by": "ada", "reason": "customer “gone”"}
    assert shop.stored("b")["status"] == "failed"
    assert shop.json("discard", "--id", "a", "--reason", "again", "--yes")["discarded"] == 0
    assert "ada" in shop.dlq("show", "a").stdout


def test_discarding_the_head_says_that_others_still_wait(shop: Shop) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4, 5)
    assert "1 of their keys still have parked" in shop.dlq("discard", "--id", "m3", "--reason", "x", "--yes").stdout
    assert shop.stored("m3")["parked_key"] is None
    whole = shop.json("discard", "--key", "k", "--reason", "x", "--yes")
    assert whole == {"discarded": 2, "keys_still_parked": 0}


def test_on_a_terminal_discard_asks_first(shop: Shop) -> None:
    shop.row("a", 1)
    code, shown = on_terminal(shop, "n\n", "discard", "--id", "a", "--reason", "x")
    assert "give up 1 message for good?" in shown
    assert (code, shop.stored("a")["status"]) == (1, "failed")
    code, _ = on_terminal(shop, "y\n", "discard", "--id", "a", "--reason", "x")
    assert (code, shop.stored("a")["status"]) == (0, "discarded")


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


def on_terminal(shop: Shop, answer: str, verb: str, *arguments: str) -> tuple[int, str]:
    """Exit code and everything that was shown."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    os.write(ours, answer.encode())
    process = subprocess.Popen(
        [sys.executable, "-m", "processor", "dlq", verb, "shop.toml", *arguments],
        cwd=shop.folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
        | {"TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # how Linux says that the other side has gone
        while piece := os.read(ours, 65_536):
            shown += piece
    os.close(ours)
    return process.wait(30), shown.decode()


# --- plans ---


@pytest.fixture
async def big(database: str) -> AsyncIterator[asyncpg.Connection[asyncpg.Record]]:
    """A hundred thousand rows, one in a thousand failed; of the failed, every fourth is parked."""
    connection = await asyncpg.connect(database)
    await connection.execute(
        """INSERT INTO inbox (key, source, "offset", payload_hash, status, message_id, record_key, parked_key)
           SELECT inbox_key('c', 'm' || n), n % 4, n, n,
                  CASE WHEN n % 1000 = 0 THEN 'failed' ELSE 'completed' END::inbox_status, 'm' || n, 'k',
                  CASE WHEN n % 4000 = 0 THEN convert_to('k' || n % 3, 'UTF8') END
           FROM generate_series(1, 100000) n"""
    )
    await connection.execute(
        """INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions,
                                first_offset, next_offset, owner, slot)
           SELECT 'c', 'topic', n, 1, 'id', 1, 0, 0, 'me', 0 FROM generate_series(0, 3) n"""
    )
    await connection.execute("ANALYZE inbox, ledger")
    yield connection
    await connection.close()


@pytest.mark.parametrize("mode", ["force_custom_plan", "force_generic_plan"])
async def test_statements_read_only_what_is_not_done(big: asyncpg.Connection[asyncpg.Record], mode: str) -> None:
    await big.execute(f"SET plan_cache_mode = {mode}")
    after = dead_letters.BEGINNING
    keys = [b"k0", b"k1"]
    some = [identity.inbox_key("c")(f"m{n}000").hex() for n in range(1, 50)]
    for wanted in (
        Filter(),
        Filter(ids=("m1000", "m2000")),
        Filter(key=b"k", reason="r", error_class="bug", since=NOW),
    ):
        arguments = wanted.arguments("c", [0])
        for statement, values in (
            (dead_letters.LIST, [*wanted.arguments("c", [0, 1, 2, 3]), 100]),
            (dead_letters.COUNT, wanted.arguments("c", [0, 1, 2, 3])),
            (dead_letters.WAITING, arguments),
            (dead_letters.SCOPE, [*arguments, some, False, None]),
            (dead_letters.COLLISIONS, [*arguments, some]),
            (dead_letters.COUNT_TO_SEND, [*arguments, some, False, 100_000, keys]),
            (dead_letters.PAGE_TO_SEND, [*arguments, some, False, 100_000, keys, *after, 1000]),
            (dead_letters.PAGE_TO_DISCARD, [*arguments, *after, 1000]),
        ):
            assert await indexes(big, statement, values) <= {"inbox_unfinished", "inbox_pkey"}, statement
    for statement, values in (
        (dead_letters.HEADS, [[0, 0], keys]),
        (dead_letters.PAGE_OF_KEYS, [0, keys, some, True, *after, 1000]),
    ):
        assert await indexes(big, statement, values) <= {"inbox_parked", "inbox_pkey"}, statement
    for statement, values in (
        (dead_letters.LOAD, [some]),
        (dead_letters.STATES, [some]),
        (dead_letters.MARK, [some, ["1"] * len(some), ["{}"] * len(some)]),
        (dead_letters.DISCARD, [some, "{}"]),
    ):
        assert await indexes(big, statement, values) <= {"inbox_pkey", "inbox_unfinished"}, statement


async def indexes(connection: asyncpg.Connection[asyncpg.Record], statement: str, values: list[Any]) -> set[str]:
    """Of the inbox that are used; "none" for a scan of the table."""
    transaction = connection.transaction()
    await transaction.start()
    try:
        plan = orjson.loads(await connection.fetchval(f"EXPLAIN (ANALYZE, FORMAT JSON) {statement}", *values))
    finally:
        await transaction.rollback()
    found: set[str] = set()

    def visit(node: dict[str, Any]) -> None:
        if node.get("Relation Name") == "inbox" and node["Node Type"] == "Seq Scan":
            found.add("none")
        if str(node.get("Index Name", "")).startswith("inbox"):
            found.add(node["Index Name"])
        for child in node.get("Plans", []):
            visit(child)

    visit(plan[0]["Plan"])
    assert found, statement
    return found
