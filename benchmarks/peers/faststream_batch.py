"""FastStream, confluent broker: a batch subscriber, two statements with arrays, the outputs confirmed together.

Guarantee: at least once. Offsets are committed after the outputs are confirmed (`NACK_ON_ERROR`); a crash in between
delivers the batch again, its rows are filtered by `seen`, its outputs are sent twice.

For speed: outputs by `publish(no_confirm=True)`, whose futures are awaited together (`publish_batch` starts a task for
each output, and the whole took 1.7 times as long), no FastDepends, values decoded in one go by a decoder of our own
(the library's parses every record of a batch a second time), a linger of 5 ms in the producer (0 was slower), asyncpg,
uvloop, no log line per batch.
"""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import orjson
import uvloop
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker, KafkaMessage
from work import CLAIM, CREATE_SEEN, RESERVE, Order, by_event_id, columns, output, read_job

job = read_job()
broker = KafkaBroker(
    job.bootstrap_servers,
    apply_types=False,
    acks="all",
    linger_ms=5,
    allow_auto_create_topics=False,
    log_level=logging.DEBUG,
)
database: asyncpg.Connection


@asynccontextmanager
async def connected() -> AsyncIterator[None]:
    global database
    database = await asyncpg.connect(job.database)
    await database.execute(CREATE_SEEN)
    yield
    await database.close()


async def decode(message: KafkaMessage) -> list[Order]:
    return [orjson.loads(record.value()) for record in message.raw_message]


@broker.subscriber(
    job.input,
    group_id=job.group,
    auto_offset_reset="earliest",
    batch=True,
    max_records=job.batch,
    polling_interval=job.linger,
    ack_policy=AckPolicy.NACK_ON_ERROR,
    decoder=decode,
)
async def reserve(orders: list[Order]) -> None:
    events = by_event_id(orders)
    async with database.transaction():
        fresh = await database.fetch(CLAIM, list(events))
        if fresh:
            new = orders if len(fresh) == len(orders) else [events[event_id] for (event_id,) in fresh]
            await database.execute(RESERVE, *columns(new))
    sent = [
        await broker.publish(orjson.dumps(output(order)), job.output, key=order["order_id"].encode(), no_confirm=True)
        for order in orders
    ]
    await asyncio.gather(*sent)


app = FastStream(broker, lifespan=connected, logger=None)

if __name__ == "__main__":
    uvloop.run(app.run())
