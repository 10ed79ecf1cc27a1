"""What most people write first: one Postgres and one Kafka transaction per record, each waited for."""

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
    producer = Producer({"bootstrap.servers": job.bootstrap_servers, "transactional.id": job.group, "linger.ms": 0})
    producer.init_transactions()
    connection = await asyncpg.connect(job.database)
    while not asked_to_stop:
        message = consumer.poll(0.2)
        if message is None:
            continue
        error = message.error()
        if error is not None:
            raise SystemExit(error.str())
        order = orjson.loads(message.value() or b"")
        order_id, sku, quantity = order["order_id"], order["sku"], order["quantity"]
        async with connection.transaction():
            await connection.execute(sql.INSERT_ONE, order_id, sku, quantity)
            await connection.execute(sql.UPDATE_ONE, sku, quantity)
        producer.begin_transaction()
        answer = orjson.dumps({"order_id": order_id, "sku": sku, "quantity": quantity})
        producer.produce(job.output, answer, message.key())
        offset = TopicPartition(job.input, message.partition(), message.offset() + 1)  # type: ignore[arg-type,operator]
        producer.send_offsets_to_transaction([offset], consumer.consumer_group_metadata())
        producer.commit_transaction()
    consumer.close()
    await connection.close()


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(Job.read()))
