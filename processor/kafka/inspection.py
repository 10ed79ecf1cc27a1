"""Asks the brokers, read-only and each time within a deadline, what a deployment needs to know before it starts.

Asking has one side effect: a cluster that never had a consumer group creates its internal offsets topic when it is
first asked about one.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation as Operation  # type: ignore[attr-defined]
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from confluent_kafka.admin import ResourceType as Resource  # type: ignore[attr-defined]

from processor.kafka import connections

if TYPE_CHECKING:
    from processor.settings.kafka import KafkaSettings

DEADLINE_SECONDS = 10.0
# librdkafka may first try a name such as localhost on an address without a listener.
SECOND_CHANCE_SECONDS = 2.0
# The answers of a broker that is taking over a group, as after its start.
COORDINATOR_MOVES = frozenset({"NOT_COORDINATOR", "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE"})
HOPELESS = frozenset({"_AUTHENTICATION", "_SSL"})

RETENTION, CLEANUP = "retention.ms", "cleanup.policy"

# With the consumer protocol the brokers decide these for the members of a group.
HEARTBEAT, SESSION = "consumer.heartbeat.interval.ms", "consumer.session.timeout.ms"


class Refused(Exception):
    """The brokers answered with an error, or not within the deadline."""


class Unreachable(Refused):
    """No broker can be used. `cause` is librdkafka's name for the reason, None if there was no answer at all."""

    def __init__(self, cause: str | None, reason: str) -> None:
        super().__init__(reason)
        self.cause = cause


@dataclass(frozen=True, slots=True)
class Access:
    """What exists under a name, and what this user may do with it."""

    number: int  # of partitions, or of members
    operations: frozenset[str]

    def forbids(self, operation: str) -> bool:
        """Brokers that do not report permissions leave them empty: then nothing is known, and nothing is forbidden."""
        return bool(self.operations) and not {operation, "ALL"} & self.operations


class Inspection:
    def __init__(self, settings: KafkaSettings) -> None:
        self._errors: list[KafkaError] = []
        try:
            callbacks = {"error_cb": self._errors.append, "logger": connections.silent}
            self._admin = AdminClient(settings.admin_config() | callbacks)
        except KafkaException as error:
            raise Refused(error.args[0].str()) from None

    def brokers(self) -> int:
        """Return how many there are; raise Unreachable as soon as it is clear that none will answer."""
        try:
            cluster = self._answer(self._admin.describe_cluster(request_timeout=DEADLINE_SECONDS))
        except KafkaException as error:
            raise Refused(error.args[0].str()) from None
        if cluster is None:
            raise self._unreachable()
        return len(cluster.nodes)

    def topics(self) -> list[str]:
        try:
            return list(self._admin.list_topics(timeout=DEADLINE_SECONDS).topics)
        except KafkaException as error:
            raise Refused(error.args[0].str()) from None

    def topic(self, name: str) -> Access:
        asked = self._admin.describe_topics(
            TopicCollection([name]), include_authorized_operations=True, request_timeout=DEADLINE_SECONDS
        )
        try:
            described = self._answer(asked[name])
        except KafkaException as error:
            raise _refused(error) from None
        if described is None:
            raise Refused("no answer from the broker")
        return Access(len(described.partitions), _names(described.authorized_operations))

    def group(self, name: str) -> Access | None:
        """Return the group, or None if it does not exist yet."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while True:
            asked = self._admin.describe_consumer_groups(
                [name], include_authorized_operations=True, request_timeout=DEADLINE_SECONDS
            )
            try:
                described = self._answer(asked[name])
                break
            except KafkaException as error:
                if error.args[0].code() == KafkaError.GROUP_ID_NOT_FOUND:
                    return None
                if error.args[0].name() not in COORDINATOR_MOVES or time.monotonic() > deadline:
                    raise _refused(error) from None
            self._admin.poll(0.1)
        if described is None:
            raise Refused("no answer from the broker")
        return Access(len(described.members), _names(described.authorized_operations))

    def group_timing(self, name: str) -> tuple[int, int] | None:
        """Return heartbeat interval and session timeout of a group in milliseconds; None if not reported."""
        asked = self._admin.describe_configs([ConfigResource(Resource.GROUP, name)], request_timeout=DEADLINE_SECONDS)
        try:
            (future,) = asked.values()
            found = self._answer(future) or {}
            return int(found[HEARTBEAT].value), int(found[SESSION].value)
        except (KafkaException, KeyError):
            return None

    def kept_ms(self, topic: str) -> int | None:
        """Return for how long a topic keeps its records, -1 for ever; None if not reported."""
        asked = self._admin.describe_configs([ConfigResource(Resource.TOPIC, topic)], request_timeout=DEADLINE_SECONDS)
        try:
            (future,) = asked.values()
            found = self._answer(future) or {}
            return int(found[RETENTION].value) if "delete" in found[CLEANUP].value else -1
        except (KafkaException, KeyError):
            return None

    def _answer(self, future: Future[Any]) -> Any:
        """Return the result, or None as soon as it is clear that there will be none."""
        started = time.monotonic()
        while not future.done():
            self._admin.poll(0.05)
            waited = time.monotonic() - started
            names = {error.name() for error in self._errors}
            hopeless = not HOPELESS.isdisjoint(names)
            down = "_ALL_BROKERS_DOWN" in names and waited > SECOND_CHANCE_SECONDS
            if hopeless or down or waited > DEADLINE_SECONDS:
                return None
        return future.result()

    def _unreachable(self) -> Unreachable:
        """Report the most basic of the errors: the others follow from it."""
        by_name = {error.name(): error for error in self._errors}
        telling = (by_name[name] for name in ("_AUTHENTICATION", "_SSL", "_RESOLVE", "_TRANSPORT") if name in by_name)
        error = next(telling, None) or next(iter(self._errors), None)
        if error is None:
            return Unreachable(None, f"no answer within {DEADLINE_SECONDS:.0f} s")
        return Unreachable(error.name(), error.str())


def _refused(error: KafkaException) -> Refused:
    return Refused(f"{error.args[0].name()}: {error.args[0].str()}")


def _names(operations: list[Operation] | None) -> frozenset[str]:
    return frozenset(operation.name for operation in operations or ())
