"""librdkafka's properties: their names, which of them are secrets, and which would break the guarantee.

Whether a name exists and a value fits, librdkafka itself decides (kafka/properties.py asks it), so a newer release
needs no change here. Names are listed only to suggest the nearest one and to find the property that an environment
variable means.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import SecretStr

Table = Literal["client", "consumer", "producer"]
Value = str | int | float | bool | SecretStr
# Why librdkafka refuses this value of this property, or None.
Judge = Callable[[str, Value], str | None]

BOTH = """
allow.auto.create.topics api.version.fallback.ms api.version.request api.version.request.timeout.ms
bootstrap.servers broker.address.family broker.address.ttl broker.version.fallback client.dns.lookup
client.id client.rack connections.max.idle.ms debug enable.metrics.push enable.random.seed
enable.sasl.oauthbearer.unsecure.jwt enable.ssl.certificate.verification https.ca.location
https.ca.pem internal.termination.signal log.connection.close log.thread.name log_level
max.in.flight max.in.flight.requests.per.connection message.copy.max.bytes message.max.bytes
metadata.broker.list metadata.max.age.ms metadata.recovery.rebootstrap.trigger.ms
metadata.recovery.strategy plugin.library.paths receive.message.max.bytes
reconnect.backoff.jitter.ms reconnect.backoff.max.ms reconnect.backoff.ms retry.backoff.max.ms
retry.backoff.ms sasl.kerberos.keytab sasl.kerberos.kinit.cmd sasl.kerberos.min.time.before.relogin
sasl.kerberos.principal sasl.kerberos.service.name sasl.mechanism sasl.mechanisms
sasl.oauthbearer.assertion.algorithm sasl.oauthbearer.assertion.claim.aud
sasl.oauthbearer.assertion.claim.exp.seconds sasl.oauthbearer.assertion.claim.iss
sasl.oauthbearer.assertion.claim.jti.include sasl.oauthbearer.assertion.claim.nbf.seconds
sasl.oauthbearer.assertion.claim.sub sasl.oauthbearer.assertion.file
sasl.oauthbearer.assertion.jwt.template.file sasl.oauthbearer.assertion.private.key.file
sasl.oauthbearer.assertion.private.key.passphrase sasl.oauthbearer.assertion.private.key.pem
sasl.oauthbearer.client.credentials.client.id sasl.oauthbearer.client.credentials.client.secret
sasl.oauthbearer.client.id sasl.oauthbearer.client.secret sasl.oauthbearer.config
sasl.oauthbearer.extensions sasl.oauthbearer.grant.type
sasl.oauthbearer.metadata.authentication.type sasl.oauthbearer.method sasl.oauthbearer.scope
sasl.oauthbearer.sub.claim.name sasl.oauthbearer.token.endpoint.url sasl.password sasl.username
security.protocol socket.blocking.max.ms socket.connection.setup.timeout.ms socket.keepalive.enable
socket.max.fails socket.nagle.disable socket.receive.buffer.bytes socket.send.buffer.bytes
socket.timeout.ms ssl.ca.certificate.stores ssl.ca.location ssl.ca.pem ssl.certificate.location
ssl.certificate.pem ssl.cipher.suites ssl.crl.location ssl.curves.list
ssl.endpoint.identification.algorithm ssl.engine.id ssl.engine.location ssl.key.location
ssl.key.password ssl.key.pem ssl.keystore.location ssl.keystore.password ssl.providers
ssl.sigalgs.list statistics.interval.ms topic.blacklist topic.metadata.propagation.max.ms
topic.metadata.refresh.fast.cnt topic.metadata.refresh.fast.interval.ms
topic.metadata.refresh.interval.ms topic.metadata.refresh.sparse
""".split()  # noqa: SIM905 - 170 lines of names would bury the rules below

CONSUMER = """
auto.commit.enable auto.commit.interval.ms auto.offset.reset check.crcs
consume.callback.max.messages coordinator.query.interval.ms enable.auto.commit
enable.auto.offset.store enable.partition.eof fetch.error.backoff.ms fetch.max.bytes
fetch.message.max.bytes fetch.min.bytes fetch.queue.backoff.ms fetch.wait.max.ms group.id
group.instance.id group.protocol group.protocol.type group.remote.assignor heartbeat.interval.ms
isolation.level max.partition.fetch.bytes max.poll.interval.ms max.poll.records offset.store.method
offset.store.path offset.store.sync.interval.ms partition.assignment.strategy
queued.max.messages.kbytes queued.min.messages session.timeout.ms share.acknowledgement.mode
""".split()  # noqa: SIM905 - 170 lines of names would bury the rules below

PRODUCER = """
acks batch.num.messages batch.size compression.codec compression.level compression.type
delivery.report.only.error delivery.timeout.ms enable.gapless.guarantee enable.idempotence linger.ms
message.send.max.retries message.timeout.ms partitioner produce.offset.report
queue.buffering.backpressure.threshold queue.buffering.max.kbytes queue.buffering.max.messages
queue.buffering.max.ms queuing.strategy request.required.acks request.timeout.ms retries
sticky.partitioning.linger.ms transaction.timeout.ms transactional.id
""".split()  # noqa: SIM905 - 170 lines of names would bury the rules below

NAMES = frozenset([*BOTH, *CONSUMER, *PRODUCER])

# Two names of one property: our default under one name must give way to the user's value under the other.
ALIASES = {
    "acks": "request.required.acks",
    "auto.commit.enable": "enable.auto.commit",
    "bootstrap.servers": "metadata.broker.list",
    "compression.type": "compression.codec",
    "delivery.timeout.ms": "message.timeout.ms",
    "linger.ms": "queue.buffering.max.ms",
    "max.in.flight": "max.in.flight.requests.per.connection",
    "max.partition.fetch.bytes": "fetch.message.max.bytes",
    "retries": "message.send.max.retries",
    "sasl.mechanism": "sasl.mechanisms",
    "sasl.oauthbearer.client.credentials.client.id": "sasl.oauthbearer.client.id",
    "sasl.oauthbearer.client.credentials.client.secret": "sasl.oauthbearer.client.secret",
}

SECRETS = frozenset(
    {
        "sasl.oauthbearer.assertion.private.key.passphrase",
        "sasl.oauthbearer.assertion.private.key.pem",
        "sasl.oauthbearer.client.credentials.client.secret",
        "sasl.oauthbearer.client.secret",
        "sasl.oauthbearer.config",
        "sasl.password",
        "ssl.key.password",
        "ssl.key.pem",
        "ssl.keystore.password",
    }
)

FUNCTIONS = frozenset({"interceptors", "logger", "msg_order_cmp", "on_commit", "on_delivery", "opaque"})


@dataclass(frozen=True, slots=True)
class Managed:
    """A property that the processor sets itself; `allowed` are values that mean the same."""

    reason: str
    allowed: frozenset[str] = frozenset()


MAX_IN_FLIGHT = frozenset("12345")
FALSE = frozenset({"false", "f", "0"})
TRUE = frozenset({"true", "t", "1"})

MANAGED = {
    "enable.auto.commit": Managed(
        "must stay false: offsets may only move in the transaction that publishes the outputs", FALSE
    ),
    "enable.auto.offset.store": Managed(
        "must stay false: offsets may only move in the transaction that publishes the outputs", FALSE
    ),
    "isolation.level": Managed(
        "must stay read_committed: aborted records would be processed, and unstable offsets trusted",
        frozenset({"read_committed"}),
    ),
    "request.required.acks": Managed(
        "must stay all: an output acknowledged by fewer replicas can vanish", frozenset({"all", "-1"})
    ),
    "enable.idempotence": Managed("must stay true: without it a retried send can double or reorder outputs", TRUE),
    "transactional.id": Managed(
        "cannot be set by hand: each worker leases its own, and two with the same one would fence each other"
    ),
    "group.id": Managed("cannot be set: the group is named by the key consumer"),
    "group.instance.id": Managed("cannot be set: workers sharing this file would fence each other"),
    "group.protocol": Managed("cannot be set here: use kafka.group_protocol"),
    "session.timeout.ms": Managed("cannot be set here: use kafka.session_timeout_ms"),
    "transaction.timeout.ms": Managed("cannot be set here: use kafka.transaction_timeout_ms"),
    "auto.offset.reset": Managed(
        "cannot be set: a lost position must never be reset silently; use kafka.start for the first start"
    ),
    "metadata.broker.list": Managed("cannot be set here: use kafka.bootstrap_servers"),
    "partition.assignment.strategy": Managed(
        "cannot be changed: only cooperative-sticky lets the other partitions go on during a rebalance",
        frozenset({"cooperative-sticky"}),
    ),
    "offset.store.method": Managed(
        "must stay broker: offsets may only move in the transaction that publishes the outputs",
        frozenset({"broker"}),
    ),
    "enable.partition.eof": Managed(
        "must stay true: the end of a partition shows that only transaction markers follow the last record", TRUE
    ),
    "delivery.report.only.error": Managed(
        "must stay false: every output's delivery is accounted for before its transaction commits", FALSE
    ),
    "plugin.library.paths": Managed("cannot be set: a plugin could undo every other rule here"),
}


def canonical(name: str) -> str:
    return ALIASES.get(name, name)


def refusal(table: Table, name: str, value: Value) -> str | None:
    """Why we refuse this property in this table, or None."""
    if name.endswith("_cb") or name in FUNCTIONS:
        return "takes a function, which a configuration file cannot give"
    managed = MANAGED.get(canonical(name))
    if managed is not None:
        return None if as_text(value).lower() in managed.allowed else managed.reason
    if canonical(name) == "max.in.flight.requests.per.connection" and as_text(value) not in MAX_IN_FLIGHT:
        return "must be at most 5: an idempotent producer cannot keep more requests in order"
    if table == "consumer" and name in PRODUCER:
        return f"is a producer property: move it to kafka.producer.{name}"
    if table == "producer" and name in CONSUMER:
        return f"is a consumer property: move it to kafka.consumer.{name}"
    return None


def applies(name: str, role: Literal["consumer", "producer"]) -> bool:
    """Whether this kind of client uses the property; the other kind would only log a warning about it."""
    return name not in (PRODUCER if role == "consumer" else CONSUMER)


def from_variable(segment: str) -> str:
    """The property that the end of an environment variable means: `SASL_PASSWORD` is `sasl.password`."""
    plain = segment.lower()
    file = plain.removesuffix("_file")
    for name in NAMES:
        if re.sub(r"[.-]", "_", name) == plain:
            return name
        if file != plain and name in SECRETS and name.replace(".", "_") == file:
            return f"{name}_file"
    return plain.replace("_", ".")


def nearest(name: str) -> str | None:
    usable = sorted(known for known in NAMES if canonical(known) not in MANAGED)
    found = difflib.get_close_matches(name, usable, n=1, cutoff=0.6)
    return found[0] if found else None


def as_text(value: Value) -> str:
    if isinstance(value, SecretStr):
        return value.get_secret_value()
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
