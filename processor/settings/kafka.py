"""`[kafka]`: the broker, the group, and everything that each client of confluent_kafka is given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationInfo, field_validator

from processor.settings import librdkafka, sources
from processor.settings.secrets import revealed
from processor.settings.table import Milliseconds, Table, refused

# A member learns of a rebalance with its next heartbeat; until then, partitions that move to it lie idle.
HEARTBEAT_MS = 250


class KafkaSettings(Table):
    """The brokers, the group, and the clients."""

    bootstrap_servers: str = Field(min_length=1, description="Addresses of brokers, as `host:port,host:port`.")
    start: Literal["earliest", "latest", "fail"] = Field(
        default="earliest",
        description="Where a consumer without any position begins: `earliest`, `latest`, or `fail` to stop with an "
        "error. Partitions that are added later are read from their beginning.",
    )
    on_database_behind: Literal["halt", "reapply"] = Field(
        default="halt",
        description="When the database has lost commits that Kafka has seen, as after a restore: `halt` the partition, "
        "or `reapply` what was lost.",
    )
    group_protocol: Literal["classic", "consumer"] = Field(
        default="classic",
        description="`classic`, or `consumer` (Kafka 4.0 on): the brokers then decide about heartbeat and session "
        "time-out, and `check --connect` says what to set there.",
    )
    session_timeout_ms: Milliseconds = Field(
        default=10_000, description="`classic` only: how long until the group notices that a process has died."
    )
    static_membership: bool = Field(
        default=False,
        description="`classic` only. `true`: a process that is started again within `session_timeout_ms` gets its "
        "partitions back at once, without a rebalance. The price: the partitions of a process that is stopped for good "
        "lie idle for that time; and partitions that a process was giving up when it was killed, in the middle of a "
        "rebalance, have no owner until the next rebalance if it comes back in time.",
    )
    transaction_timeout_ms: int = Field(
        default=15_000, ge=1_000, le=900_000, description="The broker aborts a transaction that is open for longer."
    )
    revoke_timeout_ms: Milliseconds = Field(
        default=5_000,
        description="How long the current batches may take when their partition moves to another process.",
    )
    client: dict[str, librdkafka.Value] = Field(
        default={},
        description="Any librdkafka property, for all clients. One that would break a guarantee is refused.",
    )
    consumer: dict[str, librdkafka.Value] = Field(
        default={}, description="Any librdkafka property, for the consumers only."
    )
    producer: dict[str, librdkafka.Value] = Field(
        default={}, description="Any librdkafka property, for the producer only."
    )

    @field_validator("session_timeout_ms")
    @classmethod
    def _decided_by_the_broker(cls, value: int, info: ValidationInfo) -> int:
        if info.data.get("group_protocol") == "consumer":
            raise ValueError(
                "cannot be set with group_protocol = consumer: the broker decides (group.consumer.session.timeout.ms)"
            )
        return value

    @field_validator("static_membership")
    @classmethod
    def _of_the_classic_protocol(cls, value: bool, info: ValidationInfo) -> bool:
        if value and info.data.get("group_protocol") == "consumer":
            raise ValueError("needs group_protocol = classic")
        return value

    @field_validator("client", "consumer", "producer", mode="before")
    @classmethod
    def _properties(cls, value: Any, info: ValidationInfo) -> Any:
        if not isinstance(value, Mapping):
            raise ValueError("must be a table of librdkafka properties")  # noqa: TRY004 - pydantic's protocol
        table: Any = info.field_name
        properties: dict[str, librdkafka.Value] = {}
        problems: list[tuple[str, str]] = []
        for name, item in sources.flatten(value):
            if item is None:  # its secret file could not be read; that problem is already reported
                continue
            if not isinstance(item, (str, int, float, SecretStr)):
                problems.append((name, "must be a string, a number or a boolean"))
            elif reason := librdkafka.refusal(table, name, item):
                problems.append((name, reason))
            else:
                hide = name in librdkafka.SECRETS and not isinstance(item, SecretStr)
                properties[name] = SecretStr(str(item)) if hide else item
        if problems:
            raise refused(problems)
        return properties

    @property
    def heartbeat_seconds(self) -> float:
        """How often a member asks whether the group has changed, in the classic protocol."""
        own = {**self.client, **self.consumer}.get("heartbeat.interval.ms")
        return (self._heartbeat_ms if own is None else int(str(own))) / 1000

    @property
    def _heartbeat_ms(self) -> int:
        return min(HEARTBEAT_MS, self.session_timeout_ms // 3)

    def consumer_config(self, consumer: str, instance: str | None = None) -> dict[str, Any]:
        """Everything that confluent_kafka.Consumer is given; with the name of an `instance` it is a static member."""
        fixed: dict[str, Any] = {
            "group.id": consumer,
            "group.protocol": self.group_protocol,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
        }
        if self.group_protocol == "classic":
            fixed["partition.assignment.strategy"] = "cooperative-sticky"
            fixed["session.timeout.ms"] = self.session_timeout_ms
        if instance is not None:
            fixed["group.instance.id"] = instance
        defaults: dict[str, Any] = {
            "client.id": consumer,
            "queued.max.messages.kbytes": 16_384,
            # How soon to fetch again after the queue was full. librdkafka's default of one second would limit large
            # messages to 30 MB/s.
            "fetch.queue.backoff.ms": 50,
            # A partition that is read again, as after a wait, must wait for the answer to the fetch before. While
            # nothing comes in, the broker takes this long to answer; its default is half a second.
            "fetch.wait.max.ms": 100,
        }
        if self.group_protocol == "classic":
            defaults["heartbeat.interval.ms"] = self._heartbeat_ms
        return self._config("consumer", defaults, fixed)

    def producer_config(self, transactional_id: str) -> dict[str, Any]:
        """Everything that confluent_kafka.Producer is given."""
        fixed = {
            "transactional.id": transactional_id,
            "transaction.timeout.ms": self.transaction_timeout_ms,
            "enable.idempotence": True,
            "acks": "all",
            # With the default, librdkafka 2.16 never returns from send_offsets_to_transaction, whatever the time-out,
            # if the last known broker dies during the call.
            "metadata.recovery.strategy": "none",
        }
        defaults = {
            "client.id": transactional_id,
            "linger.ms": 100,  # delays nothing: committing a transaction flushes at once
            "delivery.report.only.error": True,
            # The broker refuses a transaction until it has written the markers of the one before, which takes a few
            # milliseconds. With librdkafka's default of 100 every batch would wait that long.
            "retry.backoff.ms": 2,
            "compression.type": "lz4",  # the outputs of a batch resemble each other, and the broker has less to read
        }
        return self._config("producer", defaults, fixed)

    def admin_config(self) -> dict[str, Any]:
        """Everything that an AdminClient is given: how to connect, nothing about reading or writing."""
        shared = {
            name: revealed(value)
            for name, value in self.client.items()
            if librdkafka.applies(name, "consumer") and librdkafka.applies(name, "producer")
        }
        return {"client.id": "processor-admin", **shared, "bootstrap.servers": self.bootstrap_servers}

    def _config(
        self, role: Literal["consumer", "producer"], defaults: dict[str, Any], fixed: dict[str, Any]
    ) -> dict[str, Any]:
        own = self.consumer if role == "consumer" else self.producer
        given = {name: value for name, value in self.client.items() if librdkafka.applies(name, role)}
        overridden = {librdkafka.canonical(name) for name in own}
        given = {name: value for name, value in given.items() if librdkafka.canonical(name) not in overridden}
        given |= own
        taken = {librdkafka.canonical(name) for name in given}
        config = {name: value for name, value in defaults.items() if librdkafka.canonical(name) not in taken}
        for name, value in given.items():
            if librdkafka.canonical(name) not in librdkafka.MANAGED:
                config[name] = revealed(value)
        return {**config, "bootstrap.servers": self.bootstrap_servers, **fixed}
