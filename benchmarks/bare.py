"""The reference: the fastest loop an expert would write by hand with the same libraries, and with no guarantee.

One process, arrays, uvloop, one Postgres and one Kafka transaction per batch. No duplicate filter, no stored
outputs, no fencing: a crash between the two commits books a batch twice.
"""

from __future__ import annotations

import asyncio
import signal

import asyncpg
import orjson
import uvloop
from confluent_kafka import Consumer, Producer, TopicPartition

from benchmarks import sql
from benchmarks.job import Job


async def run(job: Job) -> None:
    asked_to_stop = False

    def stop(_number: int, _frame: object) -> None:
        nonlocal asked_to_stop
        asked_to_stop = True

    signal.signal(signal.SIGTERM, stop)
    consumer = Consumer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "group.id": job.group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([job.input])
    producer = Producer(
        {
            "bootstrap.servers": job.bootstrap_servers,
            "transactional.id": job.group,
            "linger.ms": 50,  # nothing waits for it: committing a transaction flushes at once
            "delivery.report.only.error": True,
        }
    )
    producer.init_transactions()
    connection = await asyncpg.connect(job.database)
    insert = await connection.prepare(sql.INSERT_MANY)
    update = await connection.prepare(sql.UPDATE_MANY)
    while not asked_to_stop:
        messages = consumer.consume(job.batch, job.linger_ms / 1000)
        if not messages:
            continue
        ids, skus, quantities, answers = [], [], [], []
        ends: dict[int, int] = {}
        for message in messages:
            error = message.error()
            if error is not None:
                raise SystemExit(error.str())
            order = orjson.loads(message.value() or b"")
            order_id, sku, quantity = order["order_id"], order["sku"], order["quantity"]
            ids.append(order_id)
            skus.append(sku)
            quantities.append(quantity)
            answer = orjson.dumps({"order_id": order_id, "sku": sku, "quantity": quantity})
            answers.append((answer, message.key()))
            ends[message.partition()] = message.offset()  # type: ignore[index,assignment] # never None on a record
        async with connection.transaction():
            await insert.fetch(ids, skus, quantities)
            await update.fetch(skus, quantities)
        producer.begin_transaction()
        for value, key in answers:
            producer.produce(job.output, value, key)
        offsets = [TopicPartition(job.input, partition, last + 1) for partition, last in ends.items()]
        producer.send_offsets_to_transaction(offsets, consumer.consumer_group_metadata())
        producer.commit_transaction()
    consumer.close()
    await connection.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(Job.read()))
