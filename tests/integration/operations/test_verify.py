"""`processor verify` finds each fault that is planted, and none where a service has worked honestly."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import TopicPartition

from processor.kafka import scan
from processor.operations.verify import audit, state
from processor.operations.verify.audit import Report
from processor.operations.verify.plan import Wanted
from processor.postgres import connections
from processor.settings.load import load
from tests.integration.conftest import MakeBench
from tests.integration.retention.conftest import age, prune
from tests.support import handlers
from tests.support.audits import (
    CLEAN,
    FOUND,
    audited,
    commit_offset,
    output_headers,
    output_id,
    plant_output,
)
from tests.support.bench import SECONDS, Bench, Sent
from tests.support.command import processor_beside
from tests.support.deployments import PROJECT


def sent(*names: str, partition: int = 0, **given: Any) -> list[Sent]:
    return [Sent({"what": name}, id=name, partition=partition, **given) for name in names]


async def worked(bench: Bench, *names: str) -> Bench:
    bench.send(sent(*(names or ("a", "b", "c"))))
    await bench.run_until_done()
    return bench


def key(bench: Bench, name: str) -> str:
    return str(bench.key_of(name))


# --- nothing is found where nothing is wrong ---


async def test_everything_ordinary_is_counted_by_what_it_is_and_is_no_finding(bench: MakeBench) -> None:
    b = bench(
        {"T": "reject_or_apply", "U": {"call": "reject_or_apply", "inbox": False}},
        partitions=2,
        message={"on_collision": "fail"},
    )
    handlers.failing |= {"wbad", "wagain"}
    b.send(
        [
            *sent("a", "b", "wbad", "wagain"),
            *sent("a", "b", partition=1),  # duplicates
            *sent("a", "a", partition=1),
            Sent({"what": "another"}, id="b", partition=1),  # a collision
            Sent(None, id="deleted"),
            Sent({"what": "no key"}, key=None, id="no key"),
            Sent({"what": "no id"}),
            Sent(b"{", id="broken"),
            Sent({"what": "x"}, type="unknown", id="unknown"),
            *sent("u", "u", type="U"),
            Sent({"what": "a"}, id="a", headers=[("processor-redrive", b"somebody-else:a")]),
        ]
    )
    async with b.running():
        await b.done()
        handlers.failing.clear()
        done = await processor_beside(PROJECT, "dlq", "redrive", str(b.config), "--id", "wagain")
        assert done.returncode == 0, done.stderr
        await b.done()
    plant_output(b, output_headers("another-consumer", "a"))
    plant_output(b, output_headers(b.consumer, "aborted"), commit=False)
    found = await audited(b)
    assert (found.code, found.found) == (CLEAN, [])
    assert found.input == {
        "records": 18,
        "completed": 6,
        "duplicate": 4,
        "redriven": 1,
        "failed": 4,
        "without_inbox": 2,
        "for_another_consumer": 1,
    }
    assert found.outputs == {"records": 9, "with_origin": 8, "of_others": 1}


async def test_parked_and_discarded_messages_are_no_finding(bench: MakeBench) -> None:
    b = bench("reject_or_apply", failure={"policy": "park-key"})
    handlers.failing |= {"wbad", "wgone"}
    b.send([*sent("wbad", "w1", key=b"1"), *sent("wgone", key=b"2")])
    await b.run_until_done()
    done = await processor_beside(PROJECT, "dlq", "discard", str(b.config), "--id", "wgone", "--reason", "x", "--yes")
    assert done.returncode == 0, done.stderr
    found = await audited(b)
    assert (found.code, found.input) == (CLEAN, {"records": 3, "failed": 1, "parked": 1, "discarded": 1})


async def test_what_is_not_committed_yet_is_not_judged_and_other_ranges_are_chosen_by_offset(bench: MakeBench) -> None:
    b = await worked(bench())
    places = b.send(sent("later"))
    assert (await audited(b)).input == {"records": 3, "completed": 3}
    first = await audited(b, "--from", "1", "--to", "2")
    assert first.input == {"records": 1, "completed": 1}
    by_time = await audited(b, "--since", "2001-01-01", "--until", "2002-01-01")
    assert by_time.input == {}
    assert places[0].offset > 2


async def test_what_retention_has_forgotten_is_no_finding_and_a_row_lost_above_that_is(bench: MakeBench) -> None:
    b = await worked(bench(partitions=2))
    b.send([*sent("a", "b", partition=1)])  # duplicates
    await b.run_until_done()
    await age(b, 30)
    assert (await prune(b))["deleted"] == 3
    await worked(b, "d", "e")
    found = await audited(b)
    assert (found.code, found.input) == (CLEAN, {"records": 7, "completed": 2, "forgotten": 5})
    assert found.outputs == {"records": 5, "with_origin": 5}
    await b.execute(f"DELETE FROM inbox WHERE key = '{key(b, 'e')}'")
    found = await audited(b)
    assert (found.code, found.said["found"]) == (FOUND, {"lost_row": 1, "orphan_output": 1})


# --- everything planted is found ---


async def test_a_lost_row_and_the_output_that_has_lost_its_origin(bench: MakeBench) -> None:
    b = await worked(bench(partitions=2))
    await b.execute(f"DELETE FROM inbox WHERE key = '{key(b, 'b')}'")
    found = await audited(b)
    assert found.code == FOUND
    assert found.found == [
        ("lost_row", b.input, 0, 1, "b"),
        ("orphan_output", b.output, 0, 1, output_id(b.consumer, "b")),
    ]
    assert f"{b.consumer} has no message 'b'" in found.why
    assert found.said["found"] == {"lost_row": 1, "orphan_output": 1}


async def test_a_doubled_output(bench: MakeBench) -> None:
    b = await worked(bench())
    offset = plant_output(b, output_headers(b.consumer, "b"))
    found = await audited(b)
    assert (found.code, found.found) == (
        FOUND,
        [("doubled_output", b.output, 0, offset, output_id(b.consumer, "b"))],
    )
    assert f"the first is at {b.output}[0] offset 1" in found.why


async def test_an_orphan_output(bench: MakeBench) -> None:
    b = await worked(bench())
    offset = plant_output(b, output_headers(b.consumer, "ghost"))
    found = await audited(b)
    assert (found.code, found.found) == (
        FOUND,
        [("orphan_output", b.output, 0, offset, output_id(b.consumer, "ghost"))],
    )


async def test_an_output_of_a_message_that_failed(bench: MakeBench) -> None:
    b = bench("reject_or_apply")
    handlers.failing.add("wbad")
    await worked(b, "wbad", "w1")
    offset = plant_output(b, output_headers(b.consumer, "wbad"))
    found = await audited(b)
    assert (found.code, found.found) == (
        FOUND,
        [("orphan_output", b.output, 0, offset, output_id(b.consumer, "wbad"))],
    )
    assert "its cause 'wbad' is failed, not completed" in found.why


async def test_an_output_without_our_headers_if_nobody_else_writes_there(bench: MakeBench) -> None:
    b = await worked(bench())
    offset = plant_output(b, [("message-id", b"mine")])
    assert (await audited(b)).outputs == {"records": 4, "with_origin": 3, "of_others": 1}
    found = await audited(b, "--sole-writer")
    assert (found.code, found.found) == (FOUND, [("orphan_output", b.output, 0, offset, "mine")])


async def test_an_offset_committed_past_a_record_without_a_row(bench: MakeBench) -> None:
    b = await worked(bench(partitions=2))
    places = b.send([*sent("skipped"), *sent("too", partition=1)])
    for place in places:
        commit_offset(b, place.partition, place.offset + 1)
    found = await audited(b)
    assert (found.code, found.found) == (
        FOUND,
        [
            ("offset_past_record", b.input, 0, places[0].offset, "skipped"),
            ("offset_past_record", b.input, 1, places[1].offset, "too"),
        ],
    )
    assert f"the ledger stands at {places[0].offset}" in found.why


async def test_an_output_that_is_missing_before_a_later_one(bench: MakeBench) -> None:
    b = await worked(bench())
    offset = plant_output(b, output_headers(b.consumer, "b", 3))
    found = await audited(b)
    assert (found.code, found.found) == (
        FOUND,
        [("missing_output", b.output, 0, offset, output_id(b.consumer, "b", 1))],
    )
    assert "1 more of this message are missing" in found.why


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ("UPDATE inbox SET status = 'pending' WHERE key = '{key}'", "unfinished"),
        ("UPDATE inbox SET payload_hash = payload_hash + 1 WHERE key = '{key}'", "payload_differs"),
        (
            "UPDATE inbox SET payload_hash = payload_hash + 1, \"offset\" = 0 WHERE key = '{key}'",
            "collision_without_row",
        ),
    ],
)
async def test_a_row_that_says_something_else_than_the_record(bench: MakeBench, change: str, kind: str) -> None:
    b = await worked(bench())
    await b.execute(change.format(key=key(b, "b")))
    found = await audited(b)
    assert found.code == FOUND
    assert (kind, b.input, 0, 1, "b") in found.found


async def test_stored_outputs_that_nobody_sends(bench: MakeBench) -> None:
    b = await worked(bench())
    await b.execute(
        "INSERT INTO unsent SELECT partition_id, next_offset + 5, '' FROM ledger",
        "INSERT INTO unsent SELECT partition_id, next_offset - 1, '' FROM ledger",  # sent, and not yet forgotten
        "UPDATE ledger SET updated_at = now() - interval '1 hour'",
    )
    found = await audited(b)
    assert [finding[:3] for finding in found.found] == [("unsent_outputs", b.input, 0)]
    await b.execute("UPDATE ledger SET updated_at = now()")
    assert (await audited(b)).code == CLEAN  # a service that works sends them


async def test_an_offset_behind_the_log_and_a_topic_that_the_ledger_does_not_know(bench: MakeBench) -> None:
    b = await worked(bench(partitions=2))
    commit_offset(b, 0, 1000)
    await b.execute("UPDATE ledger SET topic_id = 'another' WHERE partition = 1")
    found = await audited(b)
    assert found.found == [
        ("offset_beyond_log", b.input, 0, 1000, None),
        ("other_topic", b.input, 1, None, None),
    ]


# --- how it is run ---


async def test_findings_beyond_the_limit_are_counted_and_formats_say_the_same(bench: MakeBench) -> None:
    b = await worked(bench(), *(f"m{n}" for n in range(8)))
    await b.execute("DELETE FROM inbox")
    found = await audited(b, "--limit", "3")
    assert (len(found.found), found.said["not_shown"]) == (3, 13)
    assert found.said["found"] == {"lost_row": 8, "orphan_output": 8}
    base = ("verify", str(b.config), "--output-topic", b.output, "--limit", "3")
    lines = await processor_beside(PROJECT, *base, "-o", "jsonl")
    *findings, summary = map(json.loads, lines.stdout.splitlines())
    assert findings == found.said["findings"]
    assert summary["found"] == found.said["found"]
    table = await processor_beside(PROJECT, *base)
    assert (table.returncode, lines.returncode) == (FOUND, FOUND)
    assert f"input: 8 records of {b.input}: nothing" in table.stdout
    assert "lost_row: 8: the ledger is past this record" in table.stdout
    assert table.stdout.endswith("16 findings\n")
    assert "13 more are not named: raise --limit" in table.stderr


@pytest.mark.parametrize("how", ["interrupted", "killed"])
async def test_interrupted_and_started_again_it_goes_on_and_finds_the_same(
    bench: MakeBench, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = await worked(bench(partitions=2), *(f"m{n}" for n in range(100)))
    plant_output(b, output_headers(b.consumer, "m99"))
    plant_output(b, output_headers(b.consumer, "ghost"))
    await b.execute(f"DELETE FROM inbox WHERE key = '{key(b, 'm7')}'")
    expected = await audited(b)
    assert len(expected.found) == 4
    monkeypatch.setattr(scan, "AT_ONCE", 10)
    monkeypatch.setattr(audit, "CHUNK", 1)
    monkeypatch.setattr(audit, "CHECKPOINT_SECONDS", 0 if how == "killed" else 1000)

    async def run(chunks: int) -> Report | None:
        """So many chunks, then the end."""
        settings = load(b.config)
        stop = asyncio.Event()
        with state.folder(tmp_path / "state") as where:
            async with connections.with_tables(settings) as db:
                watcher = Ending(chunks, stop if how == "interrupted" else None)
                wanted = Wanted(output_topics=(b.output,))
                try:
                    return await audit.run(db, settings, wanted, where=where, limit=100, stop=stop, watcher=watcher)
                except Killed:
                    return None

    runs = [await run(4) for _ in range(4)]  # within the input, and within the outputs
    assert all(report is None or report.interrupted for report in runs)
    finished = await run(1000)
    assert finished is not None
    assert finished.resumed
    assert (finished.progress.inputs, finished.progress.outputs) == (expected.said["input"], expected.said["outputs"])
    assert sorted(finding[:5] for finding in finished.progress.findings.shown) == expected.found
    assert [path.name for path in (tmp_path / "state").iterdir()] == ["lock"]


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "processor", *arguments],
        cwd=PROJECT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


class Killed(Exception):
    pass


class Ending:
    """Ends an audit after so many chunks: by a signal, or at once if there is none to set."""

    def __init__(self, chunks: int, stop: asyncio.Event | None) -> None:
        self._left = chunks
        self._stop = stop

    def begin(self, total: int) -> None:
        pass

    def read(self, done: int, total: int) -> None:
        self._left -= 1
        if self._left == 0:
            if self._stop is None:
                raise Killed
            self._stop.set()

    def comparing(self) -> None:
        pass


async def test_ctrl_c_ends_it_with_130_and_the_same_command_goes_on(bench: MakeBench, tmp_path: Path) -> None:
    b = await worked(bench())
    arguments = ["verify", str(b.config), "--output-topic", b.output, "--state", str(tmp_path / "state")]
    async with b.locked("inbox"):  # so that it has something to wait for
        process = started(*arguments)
        await b.waiting_for_lock()
        other = await processor_beside(PROJECT, *arguments)
        assert (other.returncode, other.stderr.count("another audit is using it")) == (1, 1)
        process.send_signal(signal.SIGINT)
    out, err = await asyncio.to_thread(process.communicate)
    assert process.returncode == 130, err
    assert "the same command goes on" in err
    assert "clean" not in out
    other = await processor_beside(PROJECT, *arguments, "--sole-writer")
    assert (other.returncode, other.stderr.count("which was interrupted")) == (1, 1)
    done = await processor_beside(PROJECT, *arguments)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (CLEAN, "clean")


async def test_records_that_expire_while_it_reads_are_a_note_and_no_finding(bench: MakeBench, tmp_path: Path) -> None:
    b = await worked(bench(), *(f"m{n}" for n in range(30)))

    class Expiring(Ending):
        def begin(self, total: int) -> None:
            place = TopicPartition(b.input, 0, 20)
            b.admin.delete_records([place])[place].result(SECONDS)

    stop = asyncio.Event()
    async with connections.with_tables(load(b.config)) as db:
        wanted, watcher = Wanted(output_topics=(b.output,)), Expiring(1000, None)
        report = await audit.run(db, load(b.config), wanted, where=tmp_path, limit=9, stop=stop, watcher=watcher)
    assert report.ok
    assert (report.progress.inputs["completed"], report.progress.outputs["with_origin"]) == (10, 30)
    assert [span.expired for span in report.progress.plan.spans] == [20, 0]


async def test_a_topic_that_is_not_there_and_one_that_is_not_read(bench: MakeBench) -> None:
    b = await worked(bench())
    for arguments, reason in (
        (("--output-topic", "no-such-topic"), "topic no-such-topic does not exist"),
        (("--topic", "other"), f"{b.consumer} does not read other; it reads {b.input}"),
        (("--partition", "7"), f"{b.consumer} has processed nothing of partition 7 of {b.input}"),
    ):
        done = await processor_beside(PROJECT, "verify", str(b.config), *arguments)
        assert (done.returncode, done.stderr.count("\n")) == (1, 1)
        assert reason in done.stderr
    done = await processor_beside(PROJECT, "verify", str(b.config), "--from", "5", "--to", "5")
    assert done.returncode == 2
