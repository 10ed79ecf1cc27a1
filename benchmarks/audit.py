"""`processor verify` over millions of records: its memory, its rate, and that it goes on after an interruption.

Input, inbox and outputs are made as the processor leaves them, each message with one output.
"""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from struct import Struct
from typing import TYPE_CHECKING, Any

import orjson
import psutil
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from benchmarks import database, processes
from benchmarks.errors import SILENT, BenchError
from benchmarks.processes import ROOT, Command
from benchmarks.site import PARTITIONS
from benchmarks.soak import MEGABYTE
from benchmarks.subjects import BATCH

if TYPE_CHECKING:
    from benchmarks.database import Connection
    from benchmarks.job import Job
    from benchmarks.show import Show
    from benchmarks.site import Site

SAMPLE_SECONDS = 0.1
FLUSH_SECONDS = 120.0
AT_ONCE = 10_000
# The first run is interrupted when it has read this share.
INTERRUPTED_AT = 0.6
NOTE = b"n" * 100

LEDGER = """
    INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions, first_offset, next_offset, owner, slot)
    SELECT $1, $2, n, 1, $3, $4, $5, $5, 'benchmark', 0 FROM generate_series(0, $4 - 1) AS n
    RETURNING partition_id
"""
COLUMNS = ("key", "offset", "partition_id", "payload_hash")
_row = Struct("!h i16s iq ii iI").pack
_COPY_BEGIN = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_COPY_END = b"\xff\xff"


@dataclass(slots=True)
class Audit:
    messages: int  # of the input; there are as many outputs
    seconds: float = 0.0  # both runs
    highest_mb: float = 0.0
    interrupted_at: int = 0  # offsets that the first run had read
    wrong: list[str] = field(default_factory=list)

    @property
    def records(self) -> int:
        return 2 * self.messages

    @property
    def rate(self) -> float:
        return self.records / self.seconds


def audit(site: Site, messages: int, show: Show) -> Audit:
    count = messages // PARTITIONS * PARTITIONS
    result = Audit(count)
    with site.topic("audit") as topic, site.job("audit", topic) as job:
        config = site.folder / f"{job.group}.toml"
        config.write_text(BATCH.config(job))
        processes.call(Command([sys.executable, "-m", "processor", "migrate", str(config)], {}))
        topic_id = site.cluster.topic_id(topic)
        show.step(f"{count} messages of input")
        _produce(job, topic, count, lambda number: (_value(number), []), show)
        show.step(f"{count} outputs")
        _produce(job, job.output, count, lambda number: (b"{}", _output_headers(job, number)), show)
        show.step(f"{count} rows of the inbox")
        database.connected(job.database, lambda connection: _fill(connection, job, topic_id, count))
        _commit(job, count // PARTITIONS)
        show.step(f"verify {result.records} records")
        _verify(site, job, config, result, show)
    return result


def _id(number: int) -> bytes:
    return b"%032d" % number


def _key(job: Job, number: int) -> bytes:
    return hashlib.sha256(job.group.encode() + b":" + _id(number)).digest()[:16]


def _value(number: int) -> bytes:
    return b'{"event_id":"%b","type":"OrderPlaced","order_id":"o-%d","note":"%b"}' % (_id(number), number, NOTE)


def _output_headers(job: Job, number: int) -> list[tuple[str, bytes]]:
    own = f"{_key(job, number).hex()}-0".encode()
    return [("message-id", own), ("causation-id", _id(number)), ("correlation-id", _id(number))]


def _produce(job: Job, topic: str, count: int, made: Callable[[int], tuple[bytes, Any]], show: Show) -> None:
    config = {"bootstrap.servers": job.bootstrap_servers, "linger.ms": 20, "enable.idempotence": True}
    producer = Producer(config, logger=SILENT)
    failed: list[KafkaError] = []

    def delivered(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            failed.append(error)

    for number in range(count):
        value, headers = made(number)
        while True:
            try:
                producer.produce(
                    topic, value, None, number % PARTITIONS, on_delivery=delivered, headers=headers or None
                )
                break
            except BufferError:
                producer.poll(0.1)
        if number % AT_ONCE == 0:
            producer.poll(0)
            show.progress(number, count)
    if producer.flush(FLUSH_SECONDS) or failed:
        raise BenchError(f"the broker did not take the records: {failed[0].str() if failed else 'no answer in time'}")


async def _fill(connection: Connection, job: Job, topic_id: str, count: int) -> None:
    """Without the index first, which is made in one go."""
    each = count // PARTITIONS
    rows = await connection.fetch(LEDGER, job.group, job.input, topic_id, PARTITIONS, each)
    partition_ids = [row["partition_id"] for row in rows]

    async def source() -> AsyncIterator[bytes]:
        yield _COPY_BEGIN
        for first in range(0, count, AT_ONCE):
            yield b"".join(_rows(job, partition_ids, range(first, min(first + AT_ONCE, count))))
        yield _COPY_END

    await connection.execute("ALTER TABLE inbox DROP CONSTRAINT inbox_pkey; SET maintenance_work_mem = '512MB'")
    await connection.copy_to_table("inbox", source=source(), columns=COLUMNS, format="binary", timeout=None)
    await connection.execute("ALTER TABLE inbox ADD PRIMARY KEY (key)", timeout=None)
    await connection.execute("VACUUM (FREEZE, ANALYZE) inbox", timeout=None)


def _rows(job: Job, partition_ids: list[int], numbers: range) -> Iterator[bytes]:
    for number in numbers:
        partition_id, offset = partition_ids[number % PARTITIONS], number // PARTITIONS
        yield _row(4, 16, _key(job, number), 8, offset, 4, partition_id, 4, zlib.crc32(_value(number)))


def _commit(job: Job, offset: int) -> None:
    consumer = Consumer({"bootstrap.servers": job.bootstrap_servers, "group.id": job.group}, logger=SILENT)
    try:
        places = [TopicPartition(job.input, number, offset) for number in range(PARTITIONS)]
        consumer.commit(offsets=places, asynchronous=False)
    finally:
        consumer.close()


def _verify(site: Site, job: Job, config: Path, result: Audit, show: Show) -> None:
    """Interrupt it once, and let the same command go on."""
    state = site.folder / f"{job.group}-state"
    arguments = ["verify", str(config), "--json", "--output-topic", job.output, "--state", str(state)]
    for interrupted in (True, False):
        began = time.monotonic()
        said = _run(site, arguments, state, result, int(result.records * INTERRUPTED_AT) if interrupted else None, show)
        result.seconds += time.monotonic() - began
        if interrupted:
            result.interrupted_at = sum(one["position"] - one["from"] for one in said["read"])
            if not said["interrupted"]:
                result.wrong.append("it ended before it was interrupted")
    read = said["input"].get("completed", 0) + said["outputs"].get("with_origin", 0)
    if not said["ok"] or not said["resumed"] or read != result.records:
        result.wrong.append(f"{read} of {result.records} records were right: {said['found']}")


def _run(
    site: Site, arguments: list[str], state: Path, result: Audit, interrupt_at: int | None, show: Show
) -> dict[str, Any]:
    with subprocess.Popen(
        [sys.executable, "-m", "processor", *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        site.keeper.watch(process.pid)
        try:
            while process.poll() is None:
                with suppress(psutil.NoSuchProcess):
                    highest = psutil.Process(process.pid).memory_info().rss / MEGABYTE
                    result.highest_mb = max(result.highest_mb, highest)
                done = _done(state)
                show.progress(done, result.records)
                if interrupt_at is not None and done >= interrupt_at:
                    process.send_signal(signal.SIGINT)
                    interrupt_at = None
                time.sleep(SAMPLE_SECONDS)
            out, err = process.communicate()
        finally:
            process.kill()
            site.keeper.forget(process.pid)
    if process.returncode not in (0, 5, 130):
        raise BenchError(f"processor verify failed: {err.decode(errors='replace').strip()}")
    said: dict[str, Any] = json.loads(out)
    return said


def _done(state: Path) -> int:
    """As far as its last checkpoint tells."""
    try:
        spans = orjson.loads((state / "audit.json").read_bytes())["plan"]["spans"]
    except OSError:
        return 0
    return sum(span["position"] - span["start"] for span in spans)
