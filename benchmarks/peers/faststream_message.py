"""FastStream, confluent broker: a handler per message, as its tutorial shows it.

Guarantee: at least once. An offset is committed after the row is durable and the output is confirmed
(`NACK_ON_ERROR`); a crash in between delivers the record again, its row is filtered by `seen`, its output is sent
twice.

For speed: the row in one statement and so in one round trip, no FastDepends, no linger in the producer, asyncpg,
uvloop, no log line per message. `max_workers` would need `ACK_FIRST`, which loses records in a crash.
"""

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import asyncpg
import orjson
import uvloop
from faststream import AckPolicy, FastStream
from faststream.confluent import KafkaBroker
from work import CREATE_SEEN, RESERVE_ONE, Order, output, read_job

job = read_job()
broker = KafkaBroker(
    job.bootstrap_servers,
    apply_types=False,
    acks="all",
    linger_ms=0,
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


@broker.subscriber(
    job.input,
    group_id=job.group,
    auto_offset_reset="earliest",
    polling_interval=job.linger,
    ack_policy=AckPolicy.NACK_ON_ERROR,
)
async def reserve(order: Order) -> None:
    await database.execute(RESERVE_ONE, order["event_id"], order["order_id"], order["sku"], order["quantity"])
    await broker.publish(orjson.dumps(output(order)), job.output, key=order["order_id"].encode())


app = FastStream(broker, lifespan=connected, logger=None)

if __name__ == "__main__":
    uvloop.run(app.run())
