"""Quix Streams with `processing_guarantee="exactly-once"`: a sink of our own with array SQL, outputs by `to_topic`.

Guarantee: outputs and offsets in one Kafka transaction per checkpoint. The sink is flushed before it, so a crash in
between writes the rows again; here `seen` filters them. The transactional id is new with every start: what a killed
process left open holds read_committed readers up until the broker's transaction timeout.

For speed: a checkpoint per `batch` records, one sink flush for all partitions (`BatchingSink` writes once per
partition), psycopg with binary arrays, no log line per checkpoint.
"""

import tempfile
from typing import Any

import orjson
import psycopg
from quixstreams import Application
from quixstreams.models.serializers import SerializationContext, Serializer
from quixstreams.sinks import BaseSink
from work import CREATE_SEEN, Order, book, output, read_job


class OutputSerializer(Serializer):
    """Makes the output of an order on its way out: one dataframe, without a branch, for the sink and for the topic."""

    def __call__(self, value: Order, ctx: SerializationContext) -> bytes:
        return orjson.dumps(output(value))


class Reservations(BaseSink):
    """Gathers the orders of a checkpoint, from all partitions, and books them together."""

    def __init__(self, database: str) -> None:
        super().__init__()
        self._url = database
        self._orders: list[Order] = []

    def setup(self) -> None:
        self._database = psycopg.connect(self._url, autocommit=True)
        self._database.execute(CREATE_SEEN)

    def add(self, value: Order, **_: Any) -> None:
        self._orders.append(value)

    def flush(self) -> None:
        orders, self._orders = self._orders, []
        if orders:
            book(self._database, orders)

    def on_paused(self) -> None:
        self._orders = []


def main() -> None:
    job = read_job()
    with tempfile.TemporaryDirectory() as state:
        app = Application(
            broker_address=job.bootstrap_servers,
            consumer_group=job.group,
            auto_offset_reset="earliest",
            processing_guarantee="exactly-once",
            commit_every=job.batch,
            commit_interval=0.2,  # longer than a full batch takes, or it would be cut short
            consumer_poll_timeout=job.linger,  # the checkpoint is looked at between polls
            auto_create_topics=False,
            state_dir=state,
            loglevel="WARNING",
        )
        orders = app.dataframe(app.topic(job.input, key_deserializer="bytes", value_deserializer="json"))
        orders.to_topic(app.topic(job.output, key_serializer="bytes", value_serializer=OutputSerializer()))
        orders.sink(Reservations(job.database))
        app.run()  # until SIGTERM; commits the last checkpoint


if __name__ == "__main__":
    main()
