"""Arroyo (sentry-arroyo): BatchStep, then a task for the rows and outputs of a batch, then CommitOffsets.

Guarantee: at least once. Offsets are committed once a second, after the outputs are confirmed; a crash delivers up to a
second of records again, their rows are filtered by `seen`, their outputs are sent twice.

For speed: outputs go by the batch to Arroyo's thin producer; `Unfold` and `Produce`, or `KafkaProducer`, make a future
and several objects for each record and took half as much processor time again. A thread for the task
(`RunTaskInThreads`) won nothing. More records are read ahead than by default, because fetching pauses at that mark.
psycopg with binary arrays.
"""

import signal
from collections.abc import Mapping

import orjson
import psycopg
from arroyo.backends.kafka import ConfluentProducer, KafkaConsumer, KafkaPayload
from arroyo.backends.kafka.configuration import build_kafka_configuration, build_kafka_consumer_configuration
from arroyo.commit import ONCE_PER_SECOND
from arroyo.processing import StreamProcessor
from arroyo.processing.strategies import CommitOffsets, ProcessingStrategy, ProcessingStrategyFactory, RunTask
from arroyo.processing.strategies.batching import BatchStep, ValuesBatch
from arroyo.types import Commit, Message, Partition, Topic
from confluent_kafka import KafkaError, KafkaException
from work import CREATE_SEEN, Job, Order, book, output, read_job

FILL = 1.0  # seconds; long enough for a full batch, or a partial one is left over for the end


class Batches(BatchStep[KafkaPayload]):
    """A BatchStep that lets a batch go with its last record.

    The original looks at it with the next record or poll, and a poll without records takes a second: the last batch of
    the input would wait for it.
    """

    def __init__(self, size: int, next_step: ProcessingStrategy[ValuesBatch[KafkaPayload]]) -> None:
        super().__init__(size, FILL, next_step)
        self._size = size
        self._gathered = 0

    def submit(self, message: Message[KafkaPayload]) -> None:
        super().submit(message)
        self._gathered += 1
        if self._gathered % self._size == 0:
            self.poll()


class ReserveOrders(ProcessingStrategyFactory[KafkaPayload]):
    def __init__(self, job: Job) -> None:
        self._job = job
        self._database = psycopg.connect(job.database, autocommit=True)
        self._database.execute(CREATE_SEEN)
        self._producer = ConfluentProducer(build_kafka_configuration({"bootstrap.servers": job.bootstrap_servers}))

    def create_with_partitions(
        self, commit: Commit, partitions: Mapping[Partition, int]
    ) -> ProcessingStrategy[KafkaPayload]:
        return Batches(self._job.batch, RunTask(self._write, CommitOffsets(commit)))

    def _write(self, batch: Message[ValuesBatch[KafkaPayload]]) -> int:
        orders: list[Order] = [orjson.loads(value.payload.value) for value in batch.payload]
        book(self._database, orders)
        self._send(orders)
        return len(orders)

    def _send(self, orders: list[Order]) -> None:
        errors: list[KafkaError] = []

        def delivered(error: KafkaError | None, _: object) -> None:
            if error is not None:
                errors.append(error)

        for order in orders:
            value = orjson.dumps(output(order))
            self._producer.produce(self._job.output, value, order["order_id"].encode(), on_delivery=delivered)
        self._producer.flush()
        if errors:
            raise KafkaException(errors[0])

    def shutdown(self) -> None:
        self._database.close()


def main() -> None:
    job = read_job()
    consumer = KafkaConsumer(
        build_kafka_consumer_configuration(
            {"bootstrap.servers": job.bootstrap_servers},
            group_id=job.group,
            auto_offset_reset="earliest",
            queued_min_messages=100_000,
        )
    )
    processor = StreamProcessor(consumer, Topic(job.input), ReserveOrders(job), ONCE_PER_SECOND)
    for name in (signal.SIGTERM, signal.SIGINT):
        signal.signal(name, lambda *_: processor.signal_shutdown())
    processor.run()


if __name__ == "__main__":
    main()
