"""`processor trace`: the whole story of a message, in order, from the inbox and from Kafka."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from confluent_kafka import TopicPartition

from processor import Reject, Retry
from tests.conftest import Topics
from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent
from tests.support.command import processor, processor_beside
from tests.support.deployments import PROJECT
from tests.support.reading import read_all
from tests.support.scenes import messages, redrive
from tests.support.shop import Shop

THREE = {"attempts": 3, "first_delay_ms": 20, "max_delay_ms": 50}


async def traced(bench: Bench, *arguments: str) -> dict[str, Any]:
    done = await processor_beside(PROJECT, "trace", str(bench.config), *arguments, "--json")
    assert (done.returncode, done.stderr) == (0, ""), done
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def told(story: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(event["event"], event["place"]) for event in story["events"]]


async def test_message_that_was_duplicated_failed_redriven_and_replayed_is_told_in_order_by_id_key_and_place(
    bench: MakeBench, topics: Topics
) -> None:
    dead = topics("dead")
    b = bench({"T": {"call": "planned"}}, partitions=2, failure={"dead_letter_topic": dead}, retry=THREE)
    out = handlers.output_topic
    b.config.write_text(b.config.read_text().replace(':planned"', f':planned"\noutputs = ["{out}"]'))
    handlers.plans["m"] = iter([Retry("not yet"), Reject("no such sku")])
    b.send([*messages("other"), Sent({"what": "m"}, b"the-key", id="m")])
    await b.run_until_done()
    async with b.running():
        assert (await redrive(b, "--id", "m"))[0] == 0
        await b.done()
        b.send([Sent({"what": "m"}, b"the-key", id="m", partition=1)])
        await b.done()  # in one batch with the next, it would be compared with that
        b.send([Sent({"what": "else"}, b"the-key", id="m")])
        await b.done()
    expected = [
        ("came in", f"{b.input}:0:1"),
        ("retried", None),
        ("failed", None),
        ("dead letter", f"{dead}:0:0"),
        ("redriven", f"{b.input}:0:2"),
        ("completed", None),
        ("output", f"{out}:0:2"),
        ("duplicate", f"{b.input}:1:0"),
        ("collision", f"{b.input}:0:3"),
        ("output", f"{out}:0:{await replayed(b, out, '--mode', 're-emit', '--partition', '0:1-2', '--name', 'again')}"),
    ]
    by_id = await traced(b, "m")
    (story,) = by_id["messages"]
    assert told(story) == expected
    assert (story["inbox"]["status"], story["inbox"]["attempts"]) == ("completed", 3)
    by_name = {event["event"]: event for event in story["events"]}
    assert [event.get("replay") for event in story["events"] if event["event"] == "output"] == [None, "again"]
    assert by_name["failed"]["reason"] == by_name["dead letter"]["reason"] == "rejected"
    assert by_name["retried"]["class"] == "transient"
    assert "@" in by_name["redriven"]["by"]
    for place in (f"{b.input}:0:1", f"{b.input}:0:2", f"{b.input}:1:0"):
        assert (await traced(b, "--at", place))["messages"] == [story]
    by_key = (await traced(b, "--key", "the-key"))["messages"]
    assert story in by_key
    collided = next(one for one in by_key if one["id"].startswith("m~"))
    assert collided["inbox"]["status"] == "failed"
    shown = await processor_beside(PROJECT, "trace", str(b.config), "m")
    lines = shown.stdout.splitlines()
    assert lines[0] == "m: completed, attempts 3"
    assert len(lines) == 1 + len(expected)
    assert f"not looked at: {out} outside of " in shown.stderr


async def replayed(bench: Bench, topic: str, *arguments: str) -> int:
    """Replay one message, in a process of its own; return the offset of its output."""
    again = bench.config.with_suffix(".again.toml")
    again.write_text(bench.config.read_text().replace("handlers:planned", "faulty:apply"))
    before = await asyncio.to_thread(read_all, bench.bootstrap_servers, topic)
    words = ("replay", "start", str(again), *arguments, "--execute", "--json")
    environ = {"TEST_OUTPUT_TOPIC": topic}
    done = await asyncio.to_thread(processor, PROJECT, *words, environ=environ)
    assert done.returncode == 0, done
    after = await asyncio.to_thread(read_all, bench.bootstrap_servers, topic)
    assert len(after) == len(before) + 1
    return int(after[-1].offset() or 0)


async def test_what_a_replay_sent_long_afterwards_is_found_when_and_where_it_was_sent(
    bench: MakeBench, topics: Topics
) -> None:
    b = bench({"T": {"call": "planned"}})
    b.send(messages("m"))
    await b.run_until_done()
    other = topics("elsewhere")
    elsewhere = ("--mode", "re-apply", "--scope", "late", "--output-topic", other)
    offset = await replayed(b, other, *elsewhere, "--all", "--name", "late")
    await b.execute("UPDATE inbox SET received_at = received_at - interval '1 day'")
    deleted = b.admin.delete_records([TopicPartition(b.input, 0, 1)])
    await asyncio.gather(*map(asyncio.wrap_future, deleted.values()))
    (story,) = (await traced(b, "m"))["messages"]
    assert told(story) == [
        ("came in", f"{b.input}:0:0"),
        ("completed", None),
        ("output", f"{other}:0:{offset}"),
    ]
    assert story["events"][-1]["replay"] == "late"


async def test_what_was_not_looked_at_is_said(bench: MakeBench) -> None:
    b = bench()
    b.send(messages("m0", "m1", "m2"))
    await b.run_until_done()
    found = await traced(b, "m0", "--scan-limit", "2", "--output-topic", b.output)
    assert told(found["messages"][0])[0] == ("came in", f"{b.input}:0:0")
    said = " ".join(found["not_looked_at"])
    assert f"{b.input}[0] from offset 2 to 3: --scan-limit is reached" in said
    assert f"{b.output} outside of " in said
    found = await traced(b, "m0")
    assert "no handler declares its topics" in " ".join(found["not_looked_at"])


def test_place_and_id_that_nobody_knows_are_one_line_and_exit_1(shop: Shop) -> None:
    for arguments, text in (
        (("nobody",), "no message 'nobody'"),
        (("--at", f"{shop.topic}:0:7"), "no record at offset 7"),
        (("--key", "k"), "no message with this key"),
    ):
        done = processor(shop.folder, "trace", "shop.toml", *arguments)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert text in line
    shop.row("a", 7)
    found = json.loads(processor(shop.folder, "trace", "shop.toml", "--at", f"{shop.topic}:0:7", "--json").stdout)
    assert found["messages"][0]["id"] == "a", "Kafka has it no longer, the inbox has"
    wrong: list[list[str]] = [[], ["a", "--key", "k"], ["--at", "nowhere"], ["--at", "t:0:1", "--key", "k"]]
    for words in wrong:
        assert processor(shop.folder, "trace", "shop.toml", *words).returncode == 2
