"""The limits: what the database alone does with the engine's own statements, and the broker with transactions."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING

import orjson
from confluent_kafka import Producer

from benchmarks import database, pgbench, recording, workload
from benchmarks.errors import SILENT, BenchError
from benchmarks.recording import Recording
from benchmarks.results import Ceiling, Results
from benchmarks.show import Show
from benchmarks.site import Site
from benchmarks.stats import WARM_UP
from benchmarks.subjects import BATCH

if TYPE_CHECKING:
    from asyncpg import Record as Row
    from asyncpg.prepared_stmt import PreparedStatement

    from benchmarks.database import Connection

ONE_CONNECTION = "sql-1"
PRODUCE_RECORDS = 100_000
CALL_SECONDS = 30.0


class Ceilings:
    """Records once, then measures as often as wanted."""

    def __init__(self, site: Site, records: int, show: Show) -> None:
        self._site = site
        self._show = show
        feed = site.feed(records)  # tables as large as those of the run that is compared with it
        show.step("recording the statements of one worker")
        self._one = recording.record(site, feed, 1)
        show.step("recording the statements of two workers")
        self._two = recording.record(site, feed, 2)
        self._outputs = [
            (orjson.dumps({"order_id": id_, **order._asdict()}), id_)
            for id_, order, _ in workload.orders(PRODUCE_RECORDS)
        ]

    def measure(self, results: Results, repetition: int) -> None:
        def note(name: str, title: str, rate: float) -> None:
            results.ceilings.append(Ceiling(name, title, repetition, rate))
            self._show.say(f"{name:<12} {rate:>9,.0f} msg/s (limit)")

        self._show.step("replaying the statements on one connection")
        with replica(self._site, self._one) as url:
            note(ONE_CONNECTION, "the same SQL, one connection", replay(url, self._one[0]))
        for name, recordings in (("pgbench-1", self._one), ("pgbench-2", self._two)):
            self._show.step(f"the same by {name}")
            with replica(self._site, recordings) as url:
                rate = pgbench.run(recordings, url)
            clients = f"{len(recordings)} client{'s' * (len(recordings) > 1)}"
            note(name, f"the same SQL, pgbench, {clients}", rate)
        for size in (500, 2000):
            self._show.step(f"transactions of {size} records")
            note(f"produce-{size}", f"transactional produce, {size} each", self._produce(size))

    def _produce(self, size: int) -> float:
        with self._site.job("produce", "none") as job:
            settings = {
                "bootstrap.servers": job.bootstrap_servers,
                "transactional.id": job.group,
                "linger.ms": 50,
                "delivery.report.only.error": True,
            }
            producer = Producer(settings, logger=SILENT)
            producer.init_transactions(CALL_SECONDS)
            warm = int(len(self._outputs) * WARM_UP)
            started = 0.0
            for first in range(0, len(self._outputs), size):
                if not started and first >= warm:
                    started, counted = time.perf_counter(), len(self._outputs) - first
                producer.begin_transaction()
                for value, key in self._outputs[first : first + size]:
                    producer.produce(job.output, value, key)
                producer.commit_transaction(CALL_SECONDS)
            return counted / (time.perf_counter() - started)


@contextmanager
def replica(site: Site, recordings: Sequence[Recording]) -> Iterator[str]:
    """A database as the workers found it when their first batch began; afterwards it must be as they left it."""
    records = sum(one.records for one in recordings)
    with site.job("replay", "none") as job:
        BATCH.prepare(job, site.folder)
        database.connected(job.database, lambda connection: _set_up(connection, recordings))
        yield job.database
        done = database.connected(job.database, lambda connection: connection.fetchrow(_DONE))
        if done is None or tuple(done) != (records, records, records):
            raise BenchError(f"the replay did not do what was recorded: {done} for {records} records")


# Rows, inbox rows, and how far the ledger is: partitions begin at 0.
_DONE = """
    SELECT (SELECT count(*) FROM reservations), (SELECT count(*) FROM inbox), (SELECT sum(next_offset) FROM ledger)
"""


def replay(url: str, recorded: Recording) -> float:
    """One transaction after the other, as fast as the connection takes them; without the first tenth."""

    async def run(connection: Connection) -> float:
        warm = recorded.records * WARM_UP
        done, counted, started = 0, 0, time.perf_counter()
        prepared: dict[str, PreparedStatement[Row]] = {}
        for transaction in recorded.transactions:
            if not counted and done >= warm:
                counted, started = recorded.records - done, time.perf_counter()
            for sql, arguments in transaction.statements:
                if not arguments:
                    await connection.execute(sql)
                    continue
                if sql == recording.COPY:
                    table, options, data = arguments
                    await connection.copy_to_table(table, source=BytesIO(data), **options)
                    continue
                statement = prepared.get(sql)
                if statement is None:
                    statement = prepared[sql] = await connection.prepare(sql)
                await statement.fetch(*arguments)
            done += transaction.records
        return counted / (time.perf_counter() - started)

    return database.connected(url, run)


async def _set_up(connection: Connection, recordings: Sequence[Recording]) -> None:
    for recorded in recordings:
        for sql, arguments in recorded.setup:
            await connection.execute(sql, *arguments)
