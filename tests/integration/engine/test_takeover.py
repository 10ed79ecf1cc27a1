"""Where a partition starts: first time, after a crash, after an operator, after a loss. See recovery.decide."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count, repeat
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import NewPartitions  # type: ignore[attr-defined]

from processor import Unavailable
from processor.errors import Halt
from tests.conftest import Topics
from tests.integration.conftest import MakeBench
from tests.support import handlers, letters
from tests.support.bench import SECONDS, Bench, Sent
from tests.support.logs import events
from tests.support.offsets import set_offset
from tests.support.publishing import Kafka, crash
from tests.support.waiting import eventually


def sent(start: int, stop: int) -> list[Sent]:
    return [Sent({"what": f"w{n}"}, id=f"m{n}") for n in range(start, stop)]


def words(start: int, stop: int) -> list[str]:
    return [f"w{n}" for n in range(start, stop)]


def said(bench: Bench) -> list[str]:
    return [value["what"] for _, value, _ in bench.outputs()]


async def test_start_at_latest_keeps_its_position_even_if_nothing_was_processed_before_the_stop(
    bench: MakeBench,
) -> None:
    b = bench(kafka={"start": "latest"})
    b.send(sent(0, 5))
    await b.run_until_done()
    b.send(sent(5, 10))  # while it is down: no record may be skipped by starting at the latest again
    await b.run_until_done()
    assert await b.effects() == words(5, 10)


async def test_start_fail_halts_without_a_position(bench: MakeBench) -> None:
    b = bench(kafka={"start": "fail"})
    b.send(sent(0, 1))
    with pytest.raises(Halt, match=r"kafka\.start"):
        await b.run_until_done()
    assert await b.effects() == []


@pytest.mark.parametrize("start", ["latest", "fail"])
async def test_partition_that_was_added_is_read_from_its_beginning_wherever_the_consumer_began(
    bench: MakeBench, start: str
) -> None:
    b = bench(kafka={"start": start})
    b.send(sent(0, 2))
    if start == "fail":
        set_offset(b, 1)
    await b.run_until_done()
    old = await b.effects()
    b.admin.create_partitions([NewPartitions(b.input, 2)])[b.input].result(SECONDS)
    b.partitions = 2

    def led() -> bool:
        return len(b.admin.list_topics(b.input, timeout=SECONDS).topics[b.input].partitions) == 2

    eventually(led, SECONDS, "the new partition is there")
    b.send([Sent({"what": f"new{n}"}, id=f"new{n}", partition=1) for n in range(3)])
    await b.run_until_done()
    assert await b.effects() == [*old, "new0", "new1", "new2"]


async def test_forgotten_group_offsets_are_taken_from_the_ledger(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 5))
    await b.run_until_done()
    b.admin.delete_consumer_groups([b.consumer])[b.consumer].result(SECONDS)
    b.send(sent(5, 10))
    await b.run_until_done()
    assert said(b) == await b.effects() == words(0, 10)
    assert set(handlers.calls.values()) == {1}


async def test_rewind_reads_again_and_applies_and_sends_nothing_twice(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 20))
    await b.run_until_done()
    set_offset(b, 0)
    b.send(sent(20, 25))
    await b.run_until_done()
    assert said(b) == await b.effects() == words(0, 25)
    assert set(handlers.calls.values()) == {1}


async def test_rewind_tries_failed_messages_again(bench: MakeBench) -> None:
    b = bench()
    handlers.failing |= {"m1", "m3"}
    b.send(sent(0, 5))
    await b.run_until_done()
    handlers.failing.clear()
    set_offset(b, 0)
    await b.run_until_done()
    assert await b.effects() == ["w0", "w2", "w4", "w1", "w3"]
    assert {row["status"] for row in (await b.inbox()).values()} == {"completed"}


async def test_skip_ahead_is_followed(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 5))
    await b.run_until_done()
    b.send(sent(5, 10))
    set_offset(b, b.ends()[0] - 2)
    await b.run_until_done()
    assert await b.effects() == [*words(0, 5), *words(8, 10)]


async def test_outputs_left_unsent_by_a_crash_are_sent_although_an_operator_rewound(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 5))
    await b.run_until_done()
    # As a crash between the commits leaves it: rows and outputs in Postgres, the offset not moved.
    before = b.committed()[0]
    b.send(sent(5, 8))
    await b.run_until_done()
    stored = await b.rows("SELECT partition_id, next_offset FROM ledger")
    assert stored[0]["next_offset"] > before
    assert await b.rows("SELECT FROM unsent") == [], "what is known to be sent is forgotten"
    await b.execute(f"UPDATE ledger SET first_offset = {before}")
    await b.execute(
        f"INSERT INTO unsent VALUES ({stored[0]['partition_id']}, {stored[0]['next_offset']}, "
        f"decode('{_blob(b, before).hex()}', 'hex'))"
    )
    set_offset(b, 0)
    await b.run_until_done()
    assert said(b) == [*words(0, 8), "stored"]
    assert await b.effects() == words(0, 8)


def _blob(bench: Bench, source: int) -> bytes:
    from processor.messages.outputs import EncodedOutputs, Outgoing
    from processor.messages.stored import pack

    blob = pack(EncodedOutputs.of([Outgoing(source, bench.output, None, b'{"what": "stored"}', "m5", 0, "")]))
    assert blob is not None
    return blob


@pytest.mark.parametrize("moved", ["before the first start", "rewound"])
async def test_crash_after_an_operator_moved_the_offset_is_not_taken_for_another_move(
    bench: MakeBench, topics: Topics, logs: list[Any], monkeypatch: pytest.MonkeyPatch, moved: str
) -> None:
    """Without an inbox, only the positions know that a message was processed, or has failed and has its dead letter."""
    dead = topics("dead")
    b = bench({"T": {"call": "apply", "inbox": False}}, failure={"dead_letter_topic": dead})
    handlers.failing.add("failing")
    b.send([Sent({"what": "never"}, id="failing"), *sent(0, 5)])  # it rolls back no call before its own
    calls = 1
    if moved == "rewound":
        await b.run_until_done()
        calls += 1
    set_offset(b, 0)
    async with b.running():
        kafka = Kafka(b.engines[0], monkeypatch)
        await b.until(lambda: kafka.waiting, "committed in Postgres, and not in Kafka")
        await crash(b)
    await b.run_until_done()
    assert [event["found"] for event in events(logs, "partition_ready")][-1] == "died_between_commits"
    assert set(handlers.calls.values()) == {calls}
    assert said(b) == await b.effects() == words(0, 5) * calls
    assert [letter.notes["message-id"] for letter in letters.read(b.bootstrap_servers, dead)] == ["failing"] * calls


async def test_database_that_lost_commits_halts_and_reapplies_only_when_told_so(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 5))
    await b.run_until_done()
    (row,) = await b.rows("SELECT next_offset, epoch FROM ledger")
    await b.execute("CREATE TABLE backup AS SELECT * FROM ledger", "CREATE TABLE inbox_backup AS SELECT * FROM inbox")
    b.send(sent(5, 10))
    await b.run_until_done()
    # A restored backup: rows, inbox and ledger as they were.
    await b.execute(
        "DELETE FROM ledger",
        "INSERT INTO ledger OVERRIDING SYSTEM VALUE SELECT * FROM backup",
        "DELETE FROM inbox",
        "INSERT INTO inbox SELECT * FROM inbox_backup",
        "DELETE FROM effects WHERE what >= 'w5'",
    )
    b.send(sent(10, 12))
    with pytest.raises(Halt, match="lost commits"):
        await b.run_until_done()
    assert await b.effects() == words(0, 5)
    await b.run_until_done(PROCESSOR_KAFKA__ON_DATABASE_BEHIND="reapply")
    assert await b.effects() == words(0, 12)
    assert said(b) == words(0, 12)
    assert (await b.rows("SELECT epoch FROM ledger"))[0]["epoch"] > row["epoch"]


async def test_records_that_expired_unread_halt_and_the_gap_can_be_accepted(bench: MakeBench) -> None:
    b = bench()
    b.send(sent(0, 3))
    await b.run_until_done()
    b.send(sent(3, 9))
    gone = b.committed()[0] + 4
    next(iter(b.admin.delete_records([TopicPartition(b.input, 0, gone)]).values())).result(SECONDS)
    with pytest.raises(Halt, match="expired"):
        await b.run_until_done()
    set_offset(b, gone)
    await b.run_until_done()
    assert await b.effects() == [*words(0, 3), *words(7, 9)]


async def test_partition_that_has_to_halt_does_not_take_the_others_with_it(bench: MakeBench, logs: list[Any]) -> None:
    b = bench(partitions=2)
    b.send([Sent({"what": f"p{p}"}, id=f"p{p}", partition=p) for p in range(2)])
    await b.run_until_done()
    b.send([Sent({"what": f"q{p}.{n}"}, id=f"q{p}.{n}", partition=p) for p in range(2) for n in range(3)])
    gone = b.committed()[0] + 1
    next(iter(b.admin.delete_records([TopicPartition(b.input, 0, gone)]).values())).result(SECONDS)
    async with b.running():
        await b.done_with(1)
        (engine,) = b.engines
        await b.until(lambda: events(logs, "partition_halted"), "the other one halted")
        (halted,) = events(logs, "partition_halted")
        assert halted["partition"] == f"{b.input}[0]"
        assert "expired" in halted["reason"]
        assert not engine.readiness.ready
        b.send([Sent({"what": "later"}, id="later", partition=1)])
        await b.done_with(1)
    effects = await b.effects()
    assert sorted(effects[:2]) == ["p0", "p1"]  # there is no order between partitions
    assert effects[2:] == ["q1.0", "q1.1", "q1.2", "later"]


@pytest.mark.parametrize("outcome", ["committed", "aborted"])
async def test_markers_and_aborted_records_that_expired_unread_halt_nothing(bench: MakeBench, outcome: str) -> None:
    b = bench()
    b.send(sent(0, 2))
    with transaction(b, outcome) as producer:
        producer.produce(b.input, b'{"what": "w2"}', b"k", headers={"type": b"T", "message-id": b"m2"})
    await b.run_until_done()  # up to the end of the log, which is behind the marker
    done = words(0, 3 if outcome == "committed" else 2)
    assert await b.effects() == done
    (end,) = b.ends().values()
    next(iter(b.admin.delete_records([TopicPartition(b.input, 0, end)]).values())).result(SECONDS)
    b.send(sent(5, 6))
    await b.run_until_done()
    assert said(b) == await b.effects() == [*done, "w5"]


async def test_positions_move_past_markers_once_and_then_not_before_some_time_or_the_stop(
    bench: MakeBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    b = bench()
    moves: list[Any] = []
    idle: list[bool] = []
    async with b.running():
        parts = b.engines[0].parts
        add, mark_sent = parts.publishing.add, parts.housekeeping.mark_sent

        def count_moves(batch: Any, **more: Any) -> None:
            moves.extend(share for share in batch.shares.values() if share.outputs is None)
            add(batch, **more)

        async def count_idle() -> None:
            idle.append(True)
            await mark_sent()

        monkeypatch.setattr(parts.publishing, "add", count_moves)
        monkeypatch.setattr(parts.housekeeping, "mark_sent", count_idle)
        for name in ("m0", "m1"):
            with transaction(b, "committed") as producer:
                producer.produce(b.input, b'{"what": "w"}', b"k", headers={"type": b"T", "message-id": name.encode()})
            # The marker is written a moment after the commit is answered.
            await b.until(lambda: [b.ends()[0]] == [a.empty.stop for a in parts.reader.owned()], "read")
            end = b.ends()[0]
            idle.clear()
            await b.until(lambda: len(idle) == 3, "idle for some time")
            assert len(moves) == 1, "by no transaction of its own for the second marker, nor for every idle second"
        assert b.committed()[0] < end
    assert len(moves) == 2, "what was left is done at the stop"
    assert b.committed()[0] == end


async def test_marker_that_expired_after_a_crash_before_the_position_moved_past_it_halts_until_the_gap_is_accepted(
    bench: MakeBench,
) -> None:
    """Nobody can say any more whether it was a record; the halt says that it may be none."""
    b = bench()

    async def nothing_unsent() -> bool:
        return not await b.rows("SELECT FROM unsent")

    def produce(name: str) -> None:
        with transaction(b, "committed") as producer:
            value = f'{{"what": "{name}"}}'.encode()
            producer.produce(b.input, value, b"k", headers={"type": b"T", "message-id": name.encode()})

    async with b.running():
        produce("m0")
        await b.until(lambda: b.committed().get(0) == 2, "past the marker at once")
        produce("m1")
        await b.until(lambda: b.committed().get(0) == 3, "past the record, and not past its marker for a minute")
        await b.until(nothing_unsent, "nothing is owed to Kafka")
        await crash(b)
    assert (b.ends()[0], b.committed()[0]) == (4, 3)
    next(iter(b.admin.delete_records([TopicPartition(b.input, 0, 4)]).values())).result(SECONDS)
    with pytest.raises(Halt, match=r"is 3, the log now begins at 4: records expired .* or at best the markers of a"):
        await b.run_until_done()
    set_offset(b, 4)
    b.send(sent(5, 6))
    await b.run_until_done()
    assert said(b) == await b.effects() == ["m0", "m1", "w5"]


async def test_position_of_a_quiet_partition_moves_past_a_marker_while_another_one_is_busy(bench: MakeBench) -> None:
    b = bench(partitions=2)
    with transaction(b, "committed") as producer:
        producer.produce(b.input, b'{"what": "w"}', b"k", 1, headers={"type": b"T", "message-id": b"quiet"})
    end = 2  # the record and its marker
    busy = count()

    def moved() -> bool:
        b.send([Sent({"what": "busy"}, id=f"busy{next(busy)}")])
        return b.committed().get(1) == end

    async with b.running():
        await b.until(lambda: asyncio.to_thread(moved), "moved, although there is always something to do")


@contextmanager
def transaction(bench: Bench, outcome: str) -> Iterator[Producer]:
    """Of somebody upstream."""
    producer = Producer({"bootstrap.servers": bench.bootstrap_servers, "transactional.id": bench.input, "log_level": 0})
    producer.init_transactions(SECONDS)
    producer.begin_transaction()
    yield producer
    producer.flush(SECONDS)
    if outcome == "committed":
        producer.commit_transaction(SECONDS)
    else:
        producer.abort_transaction(SECONDS)


async def test_late_error_about_another_offset_than_the_one_to_be_read_halts_nothing(
    bench: MakeBench, logs: list[Any]
) -> None:
    b = bench()
    b.send(sent(0, 3))
    async with b.running():
        source, partitions = b.engines[0].reader, b.engines[0].parts.partitions
        await b.done()
        (owned,) = partitions.owned()
        next(iter(b.admin.delete_records([TopicPartition(b.input, 0, 2)]).values())).result(SECONDS)
        late = LateErrors(source._consumer)
        source._consumer = late  # type: ignore[assignment]
        partitions.begin(owned, 0)
        await b.until(lambda: late.errors, "the log does not hold that offset")
        partitions.begin(owned, 3)
        b.send(sent(3, 4))
        await b.until(lambda: handlers.calls["m3"], "read where it is to be read")
        late.deliver.set()
        await b.until(lambda: not late.errors, "delivered at last")
        b.send(sent(4, 6))
        await b.done()
    assert said(b) == await b.effects() == words(0, 6)
    assert not events(logs, "partition_halted")


@pytest.mark.parametrize("away", ["suspended", "not ours any more"])
async def test_late_error_about_a_partition_that_is_not_read_any_more_halts_and_starts_over_nothing(
    bench: MakeBench, logs: list[Any], away: str
) -> None:
    b = bench(partitions=2)
    b.send(sent(0, 3))
    async with b.running():
        source, partitions = b.engines[0].reader, b.engines[0].parts.partitions
        await b.done()
        (owned,) = (one for one in partitions.owned() if one.partition.number == 0)
        next(iter(b.admin.delete_records([TopicPartition(b.input, 0, 2)]).values())).result(SECONDS)
        late = LateErrors(source._consumer)
        source._consumer = late  # type: ignore[assignment]
        partitions.begin(owned, 0)
        await b.until(lambda: late.errors, "the log does not hold that offset")
        if away == "suspended":
            partitions.suspend([owned])
        else:
            source.disown([owned.assignment])
        late.deliver.set()
        await b.until(lambda: not late.errors, "delivered at last")
        b.send([Sent({"what": "other"}, id="other", partition=1)])  # read on the same thread, so after the error
        await b.done_with(1)
        assert not events(logs, "starting_over")
        if away == "suspended":
            partitions.begin(owned, 3)
        else:
            source.assign([owned.partition])
        b.send(sent(3, 6))
        await b.done()
    assert said(b) == await b.effects() == [*words(0, 3), "other", *words(3, 6)]
    assert not events(logs, "partition_halted")


class LateErrors:
    """A consumer whose errors come when they are asked for."""

    def __init__(self, consumer: Consumer) -> None:
        self._consumer = consumer
        self.errors: list[Message] = []
        self.deliver = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def poll(self, seconds: float) -> Message | None:
        if self.errors and self.deliver.is_set():
            return self.errors.pop()
        message = self._consumer.poll(seconds)
        return None if message is None or self._kept(message) else message

    def consume(self, number: int, seconds: float) -> list[Message]:
        if self.errors and self.deliver.is_set():
            return [self.errors.pop()]
        return [message for message in self._consumer.consume(number, seconds) if not self._kept(message)]

    def _kept(self, message: Message) -> bool:
        error = message.error()
        late = error is not None and error.code() == KafkaError._AUTO_OFFSET_RESET and not self.deliver.is_set()
        if late:
            self.errors.append(message)
        return late


async def test_records_that_expire_while_their_partition_waits_halt_that_one_and_no_other(
    bench: MakeBench, logs: list[Any]
) -> None:
    b = bench("planned", partitions=2)
    handlers.plans["m0"] = repeat(Unavailable("down", after=0.1))
    b.send(sent(0, 3))
    async with b.running():
        await b.until(lambda: handlers.calls["m0"], "it waits")
        next(iter(b.admin.delete_records([TopicPartition(b.input, 0, 3)]).values())).result(SECONDS)
        await b.until(lambda: events(logs, "partition_halted"), "nothing left to be tried again")
        b.send([Sent({"what": "other"}, id="other", partition=1)])
        await b.done_with(1)
    (halted,) = events(logs, "partition_halted")
    assert (halted["partition"], "expired" in halted["reason"]) == (f"{b.input}[0]", True)
    assert await b.effects() == ["other"]
