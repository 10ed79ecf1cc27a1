"""DBOS: its Kafka consumer starts a workflow per message, with one step that books the order and sends the output.

Guarantee: a workflow per topic, partition and offset, resumed after a crash; the step repeats if the crash came
before its result was recorded. Then `seen` filters the row, and the output is sent twice. Messages run in parallel,
in any order.

For speed: no `ordering`, one step (a datasource transaction for the row and a step for the output gave the same
guarantee at about half the rate), the row in one statement, Kafka batches of `batch`, the queue polled five times a
second, threads and connections for 16 messages at a time.
"""

import queue
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import orjson
import psycopg
from confluent_kafka import KafkaError, KafkaException, Message, Producer
from dbos import DBOS, DBOSConfig, KafkaMessage
from work import CREATE_SEEN, RESERVE_ONE, Order, for_psycopg, output, read_job

THREADS = 16
RESERVE_SQL = for_psycopg(RESERVE_ONE)

job = read_job()
config: DBOSConfig = {
    "name": "peer",
    "system_database_url": job.database,
    "sys_db_pool_size": THREADS,
    "max_executor_threads": THREADS,
    "kafka_queue_polling_interval_sec": 0.2,
    "log_level": "WARNING",
}
DBOS(config=config)
producer = Producer({"bootstrap.servers": job.bootstrap_servers, "linger.ms": 0})
connections: queue.SimpleQueue[psycopg.Connection] = queue.SimpleQueue()


@contextmanager
def connection() -> Iterator[psycopg.Connection]:
    taken = connections.get()
    try:
        yield taken
    finally:
        connections.put(taken)


def send(order: Order) -> Future[None]:
    sent: Future[None] = Future()

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is None:
            sent.set_result(None)
        else:
            sent.set_exception(KafkaException(error))

    producer.produce(job.output, orjson.dumps(output(order)), order["order_id"].encode(), on_delivery=delivered)
    return sent


@DBOS.step()
def reserve(order: Order) -> None:
    with connection() as database:
        arguments = (order["event_id"], order["order_id"], order["sku"], order["quantity"])
        database.execute(RESERVE_SQL, arguments, prepare=True)
    send(order).result()


@DBOS.kafka_consumer(
    {"bootstrap.servers": job.bootstrap_servers, "group.id": job.group, "auto.offset.reset": "earliest"},
    [job.input],
    batch_size=job.batch,
)
@DBOS.workflow()
def order_placed(message: KafkaMessage) -> None:
    reserve(orjson.loads(message.value))


def main() -> None:
    for _ in range(THREADS):
        connections.put(psycopg.connect(job.database, autocommit=True))
    with connection() as database:
        database.execute(CREATE_SEEN)

    asked_to_stop = threading.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: asked_to_stop.set())

    stopped = threading.Event()

    def serve_callbacks() -> None:
        while not stopped.is_set():
            producer.poll(0.1)

    callbacks = threading.Thread(target=serve_callbacks)
    callbacks.start()
    DBOS.launch()
    asked_to_stop.wait()
    DBOS.destroy(workflow_completion_timeout_sec=10)
    stopped.set()
    callbacks.join()


if __name__ == "__main__":
    main()
