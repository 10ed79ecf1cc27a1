"""An input topic is deleted and created anew: nothing of the new one is taken for the old one's, or lost with it."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic  # type: ignore[attr-defined]

from processor.errors import Halt
from tests.conftest import Deploy, Start
from tests.integration.conftest import MakeBench
from tests.support import command, handlers
from tests.support.bench import SECONDS, Bench, Sent
from tests.support.deployments import PROJECT
from tests.support.waiting import eventually

BY_OFFSET = {"id": ["offset"]}


def sent(start: int, stop: int, **given: Any) -> list[Sent]:
    return [Sent({"what": f"w{n}"}, id=f"m{n}", **given) for n in range(start, stop)]


def words(start: int, stop: int) -> list[str]:
    return [f"w{n}" for n in range(start, stop)]


def said(bench: Bench) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs()]


def create_anew(bootstrap_servers: str, topic: str) -> None:
    """A topic of the same name, with one partition, instead of the one that is there."""
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    admin.delete_topics([topic])[topic].result(SECONDS)

    def created() -> bool:
        return admin.create_topics([NewTopic(topic, 1, 1)])[topic].exception(SECONDS) is None

    eventually(created, SECONDS, "the topic can be created again")


def run(config: Path, *arguments: str) -> tuple[int, Any]:
    """`processor VERB CONFIG …`: its exit code, and what it printed, read as JSON if it is."""
    verb, *rest = arguments
    words = [*verb.split(), str(config), *rest]
    done = command.processor(PROJECT, *words)
    return done.returncode, json.loads(done.stdout) if "--json" in rest else done.stdout + done.stderr


async def halted(b: Bench) -> None:
    with pytest.raises(Halt, match=r"created anew.*processor topic-recreated"):
        await b.run_until_done()


async def test_recreated_topic_halts_until_an_operator_says_so_and_is_then_read_from_its_beginning(
    bench: MakeBench,
) -> None:
    """With ids by offset, the new records are at offsets that the inbox has seen."""
    b = bench(message=BY_OFFSET)
    b.send(sent(0, 6))
    await b.run_until_done()
    create_anew(b.bootstrap_servers, b.input)
    b.send(sent(6, 15))
    await halted(b)
    code, preview = run(b.config, "topic-recreated", "--dry-run")
    assert (code, f"{b.input}: was" in preview) == (0, True), preview
    await halted(b)
    assert await b.effects() == words(0, 6)
    assert run(b.config, "topic-recreated")[0] == 2, "nobody is there to confirm"
    await halted(b)

    code, printed = run(b.config, "topic-recreated", "--yes")
    assert code == 0, printed
    assert run(b.config, "topic-recreated", "--yes") == (
        0,
        "nothing to do: every topic is the one that was read before\n",
    )
    await b.run_until_done()
    assert await b.effects() == words(0, 15)
    assert said(b) == words(0, 15)


async def test_message_that_comes_again_in_the_recreated_topic_under_its_own_id_is_a_duplicate(
    bench: MakeBench,
) -> None:
    b = bench()
    b.send(sent(0, 5))
    await b.run_until_done()
    create_anew(b.bootstrap_servers, b.input)
    b.send([*sent(2, 3), Sent({"what": "other"}, id="m1"), *sent(3, 9)])
    assert run(b.config, "topic-recreated", "--yes")[0] == 0
    await b.run_until_done()
    assert await b.effects() == said(b) == words(0, 9)
    collided = await b.rows("SELECT status::text AS status FROM inbox WHERE status <> 'completed'")
    assert [row["status"] for row in collided] == ["failed"], "another payload at an old offset is no redelivery"


async def test_message_that_failed_in_the_old_topic_stays_in_dlq_and_is_redriven_through_the_new_one(
    bench: MakeBench,
) -> None:
    b = bench({"T": "apply", "R": "reject_or_apply"}, message=BY_OFFSET)
    handlers.failing.add("bad")
    b.send([*sent(0, 2), Sent({"what": "bad"}, type="R"), *sent(2, 4)])
    await b.run_until_done()
    create_anew(b.bootstrap_servers, b.input)
    b.send(sent(4, 8))
    assert run(b.config, "topic-recreated", "--yes")[0] == 0
    await b.run_until_done()
    code, listed = run(b.config, "dlq list", "--json")
    (message,) = listed["messages"]
    assert (code, message["status"], message["offset"]) == (0, "failed", 2)
    handlers.failing.clear()
    async with b.running():
        code, printed = await asyncio.to_thread(run, b.config, "dlq redrive", "--all")
        assert code == 0, printed
        await b.done()
    assert await b.effects() == [*words(0, 2), *words(2, 4), *words(4, 8), "bad"]
    assert run(b.config, "dlq list", "--json")[1]["messages"] == []


async def test_message_that_waited_for_a_retry_when_its_topic_was_deleted_can_be_redriven(bench: MakeBench) -> None:
    b = bench(
        {"T": "apply", "R": "planned"}, retry={"attempts": 5, "first_delay_ms": 3_600_000, "max_delay_ms": 3_600_000}
    )
    handlers.plans["r1"] = iter([RuntimeError("not yet")])
    b.send([Sent({"what": "later"}, type="R", id="r1")])
    async with b.running():
        await b.until(lambda: b.rows("SELECT FROM inbox WHERE status = 'pending'"), "it waits for its next attempt")
    create_anew(b.bootstrap_servers, b.input)
    code, printed = run(b.config, "topic-recreated", "--yes")
    assert (code, "1 pending" in printed) == (0, True), printed
    (row,) = await b.rows("SELECT message_id, status::text AS status, payload FROM inbox")
    assert row == {"message_id": "r1", "status": "failed", "payload": b'{"what": "later"}'}


async def test_offset_that_the_group_still_has_of_the_old_topic_does_not_stop_the_new_one(bench: MakeBench) -> None:
    """Brokers delete offsets with their topic, unless the coordinator was down just then."""
    b = bench(message=BY_OFFSET)
    b.send(sent(0, 9))
    await b.run_until_done()
    (row,) = await b.rows("SELECT epoch FROM ledger")
    create_anew(b.bootstrap_servers, b.input)
    b.send(sent(9, 20))
    stale = TopicPartition(b.input, 0, 9, f"processor epoch={row['epoch']}")
    consumer = Consumer({"bootstrap.servers": b.bootstrap_servers, "group.id": b.consumer, "log_level": 0})
    consumer.commit(offsets=[stale], asynchronous=False)
    consumer.close()
    assert run(b.config, "topic-recreated", "--yes")[0] == 0
    await b.run_until_done()
    assert await b.effects() == said(b) == words(0, 20)


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_topic_that_is_recreated_while_it_is_read_halts(protocol: str, deployment: Deploy, start: Start) -> None:
    """librdkafka goes on in the new topic, at its position in the old one, and reports nothing."""
    patient = {"session_timeout_ms": 30_000} if protocol == "classic" else {}
    deployed = deployment(protocol=protocol, partitions=1, settings={"kafka": patient})
    deployed.feed().send(3)
    process = start(deployed)
    deployed.verifier().wait_until_done()
    process.stop()
    create_anew(deployed.bootstrap_servers, deployed.input_topic)
    deployed.feed().send(30)
    process.cont()
    assert process.wait() == 3, process.tail()
    assert "created anew" in process.tail()


async def test_check_connect_sees_a_recreated_topic_as_run_does(bench: MakeBench) -> None:
    b = bench(failure={"dead_letter_topic": ""})
    b.send(sent(0, 3))
    await b.run_until_done()
    assert run(b.config, "check", "--connect")[0] == 0
    create_anew(b.bootstrap_servers, b.input)
    code, printed = run(b.config, "check", "--connect")
    assert code == 1
    assert f"{b.input} was deleted and created anew" in printed
    assert "processor topic-recreated" in printed


def test_outputs_that_were_not_sent_when_the_topic_was_recreated_are_sent_once(
    deployment: Deploy, start: Start
) -> None:
    deployed = deployment(partitions=1)
    verifier = deployed.verifier()
    deployed.feed().send(40)
    doomed = start(deployed, failpoints="after_postgres_commit=kill@1")
    assert doomed.wait() == -signal.SIGKILL, doomed.tail()
    report = verifier.judge(everything=True)
    assert report.rows > report.outputs == 0
    create_anew(deployed.bootstrap_servers, deployed.input_topic)
    code, printed = run(deployed.config, "topic-recreated", "--yes")
    assert (code, "not known to be sent" in printed) == (0, True), printed
    for _ in range(2):
        process = start(deployed)
        process.wait_for_partitions(1)
        process.terminate()
        assert process.wait() == 0, process.tail()
    after = verifier.judge(everything=True)
    assert (after.rows, after.outputs) == (report.rows, report.rows)
