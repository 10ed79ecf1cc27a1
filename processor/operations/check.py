"""`processor check`: is this deployment described rightly, and do the servers agree?

Offline it reads the configuration, imports the handlers and lets librdkafka judge its own settings. With
`--connect` it also asks brokers and database, read-only and each within a deadline. What cannot be asked without a
side effect is reported as not asked, never guessed.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from processor.errors import ConfigError, ProcessorError, SetupError
from processor.handling import registry
from processor.kafka import properties
from processor.kafka.cluster import Cluster
from processor.kafka.inspection import HEARTBEAT, SESSION, Inspection, Refused, Unreachable
from processor.operations import topic_recreated
from processor.postgres import connections, migrate, rights
from processor.settings import importing

if TYPE_CHECKING:
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

DEADLINE_SECONDS = 10.0

# What is good enough for a group whose brokers decide it, and what is better.
SLOWEST_HEARTBEAT_MS, LONGEST_SESSION_MS = 500, 10_000
BETTER_HEARTBEAT_MS, BETTER_SESSION_MS = 250, 6_000

Kind = Literal["configuration", "server"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. `ok` is None where it could not be asked, or is not wrong but could be better."""

    kind: Kind
    name: str
    ok: bool | None
    text: str


def exit_code(findings: list[Finding]) -> int:
    failed = {finding.kind for finding in findings if finding.ok is False}
    return 2 if "configuration" in failed else 1 if failed else 0


def offline(settings: Settings) -> list[Finding]:
    """Everything that needs no server."""
    topics = ", ".join(settings.topics)
    read = Finding("configuration", settings.source, True, f"consumer {settings.consumer}, topics {topics}")
    return [read, *_handlers(settings), *_classes(settings), *_clients(settings), *_migrations(settings)]


def connected(settings: Settings) -> list[Finding]:
    """Ask both servers; any answer, an error too, is a finding, never an exception."""
    findings = [*broker(settings), *asyncio.run(database(settings))]
    if exit_code(findings) == 0:
        findings += asyncio.run(same_topics(settings))
    return findings


def broker(settings: Settings) -> list[Finding]:
    """Whether the brokers are reachable and let us in, the topics exist, and this user may read or write them."""
    servers = settings.kafka.bootstrap_servers
    where = f"{settings.source}: kafka.bootstrap_servers"
    try:
        inspection = Inspection(settings.kafka)
        findings = [Finding("server", "kafka", True, f"{servers}, {inspection.brokers()} broker(s)")]
        known = inspection.topics()
    except Unreachable as error:
        text = f"{where}: cannot use {servers}: {_reason(settings, error)}; {_fix(error)}"
        return [Finding("server", "kafka", False, text)]
    except Refused as error:
        return [Finding("server", "kafka", False, f"{where}: cannot use {servers}: {settings.redact(str(error))}")]
    findings += [_topic(settings, inspection, topic, known) for topic in settings.topics]
    dead_letters = dict.fromkeys(filter(None, map(settings.dead_letter_topic, settings.topics)))
    findings += [_dead_letter_topic(settings, inspection, topic, known) for topic in dead_letters]
    findings += _output_topics(settings, inspection, known)
    findings.append(
        _retention(settings, inspection, [name for name in (*settings.topics, *dead_letters) if name in known])
    )
    findings.append(_group(settings, inspection))
    if settings.kafka.group_protocol == "consumer":
        findings.append(_timing(settings, inspection))
    text = "writing outputs and using the transactional id: brokers only answer an attempt; not tried here"
    return [*findings, Finding("server", "kafka write permissions", None, text)]


async def database(settings: Settings) -> list[Finding]:
    """Whether it is reachable and writable, has the schema this code needs, and lets this role use it."""
    try:
        async with asyncio.timeout(DEADLINE_SECONDS), connections.connected(settings) as connection:
            findings = [_server(settings, await connections.server(connection))]
            if grants := await rights.missing(connection, settings.database.schema):
                text = f"{settings.source}: database.url: {rights.lacks(grants)}"
                return [*findings, Finding("server", "database permissions", False, text)]
            findings.append(await _schema(settings, connection, migrate.sets(settings)))
            if findings[-1].ok:  # without tables, there are no rights on them to look at
                text = "the processor's tables may be written"
                findings.append(Finding("server", "database permissions", True, text))
            return findings
    except TimeoutError:
        text = f"{settings.source}: database.url: no answer within {DEADLINE_SECONDS:.0f} s"
    except (SetupError, ConfigError) as error:
        text = str(error)
    except connections.ERRORS as error:
        text = connections.unreachable(settings, error)
    return [Finding("server", "database", False, text)]


async def same_topics(settings: Settings) -> list[Finding]:
    """Whether the topics are those that were read before, and not new ones under their names."""
    where = f"{settings.source}: topics"
    cluster = Cluster(settings.kafka, settings.consumer)
    try:
        async with connections.connected(settings) as connection:
            found = await topic_recreated.find(connection, settings.consumer, cluster.topics(settings.topics))
    except ProcessorError as error:
        return [Finding("server", "topic ids", False, f"{where}: {error}")]
    finally:
        cluster.close()
    fix = "to read the new one from its beginning: `processor topic-recreated CONFIG`"
    return [
        Finding(
            "server",
            f"topic {one.name}",
            False,
            f"{where}: {one.name} was deleted and created anew (id {one.known_id}, now {one.id}): `run` halts; {fix}",
        )
        for one in found
    ] or [Finding("server", "topic ids", True, "no topic that was read before has been created anew")]


def _handlers(settings: Settings) -> Iterator[Finding]:
    for type_, handler in settings.handlers.items():
        name = f"handlers.{type_}"
        try:
            registry.load(settings.model_copy(update={"handlers": {type_: handler}}))
        except ConfigError as error:
            yield Finding("configuration", name, False, settings.redact(str(error)))
        else:
            kind = ", external effect" if handler.effect else "" if handler.inbox else ", without inbox"
            yield Finding("configuration", name, True, f"{handler.call}{kind}")


def _classes(settings: Settings) -> Iterator[Finding]:
    if not settings.failure.classes:
        return
    try:
        importing.error_classes(settings)
    except ConfigError as error:
        yield Finding("configuration", "failure.classes", False, settings.redact(str(error)))
    else:
        yield Finding("configuration", "failure.classes", True, ", ".join(settings.failure.classes))


def _clients(settings: Settings) -> Iterator[Finding]:
    roles: tuple[tuple[Literal["consumer", "producer"], dict[str, Any]], ...] = (
        ("consumer", settings.kafka.consumer_config(settings.consumer)),
        ("producer", settings.kafka.producer_config(f"{settings.consumer}-check")),
    )
    refused = False
    for role, config in roles:
        if text := properties.misfit(role, config):
            refused = True
            line = f"{settings.source}: kafka.{role}: librdkafka refuses it: {settings.redact(text)}"
            yield Finding("configuration", f"kafka.{role}", False, line)
    if not refused:
        yield Finding("configuration", "kafka", True, "librdkafka accepts every setting")


def _migrations(settings: Settings) -> Iterator[Finding]:
    try:
        for found in migrate.sets(settings):
            last = found.migrations[-1]
            yield Finding("configuration", f"migrations {found.name}", True, f"up to {last.version:04}_{last.name}")
    except ConfigError as error:
        yield Finding("configuration", "migrations", False, str(error))


def _reason(settings: Settings, error: Refused) -> str:
    return " ".join(settings.redact(str(error)).split())


def _fix(error: Unreachable) -> str:
    match error.cause:
        case "_AUTHENTICATION":
            return "check sasl.mechanism, sasl.username and sasl.password under kafka.client"
        case "_SSL":
            return "check security.protocol and the ssl.* keys under kafka.client"
        case "_RESOLVE":
            return "is the host name right?"
        case _:
            return "is the broker running, the address right, and security.protocol what it expects?"


def _topic(settings: Settings, inspection: Inspection, topic: str, known: list[str]) -> Finding:
    name, where = f"topic {topic}", f"{settings.source}: topics"
    if topic not in known:
        return Finding("server", name, False, f"{where}: {topic} does not exist; {_nearest(topic, known)}")
    return _permitted(inspection, topic, "READ", name, where)


def _dead_letter_topic(settings: Settings, inspection: Inspection, topic: str, known: list[str]) -> Finding:
    name, where = f"dead-letter topic {topic}", f"{settings.source}: failure.dead_letter_topic"
    if topic not in known:
        # Without suggesting a similar name: that would be the dead-letter topic of another deployment.
        hint = 'create it, allow this user to describe it, or set "" to keep failed messages as rows only'
        return Finding("server", name, False, f"{where}: {topic} does not exist; {hint}")
    return _permitted(inspection, topic, "WRITE", name, where)


def _output_topics(settings: Settings, inspection: Inspection, known: list[str]) -> Iterator[Finding]:
    """Those that handlers declare."""
    where = {
        topic: f"{settings.source}: handlers.{type_}.outputs"
        for type_, handler in settings.handlers.items()
        for topic in handler.outputs
    }
    for topic, key in where.items():
        name = f"output topic {topic}"
        if topic in known:
            yield _permitted(inspection, topic, "WRITE", name, key)
        else:
            yield Finding("server", name, False, f"{key}: {topic} does not exist; {_nearest(topic, known)}")


def _nearest(topic: str, known: list[str]) -> str:
    near = difflib.get_close_matches(topic, known, n=1)
    return f"did you mean {near[0]}?" if near else "create it, or allow this user to describe it"


def _permitted(
    inspection: Inspection, topic: str, operation: Literal["READ", "WRITE"], name: str, where: str
) -> Finding:
    try:
        access = inspection.topic(topic)
    except Refused as error:
        return Finding("server", name, False, f"{where}: {topic}: {error}")
    if access.forbids(operation):
        return Finding("server", name, False, f"{where}: {topic}: this user may not {operation} it; add the ACL")
    use = "read" if operation == "READ" else "written"
    return Finding("server", name, True, f"{access.number} partition(s), may be {use}")


def _retention(settings: Settings, inspection: Inspection, topics: list[str]) -> Finding:
    """What a topic still has can come again: by a rewind, a replay, or by hand out of the dead letters."""
    span = settings.retention.span
    if span is None:
        return Finding("server", "retention", True, "completed messages are remembered for ever")
    remembered = f"completed messages are remembered for {_days(span / timedelta(milliseconds=1))}"
    kept = {topic: inspection.kept_ms(topic) for topic in topics}
    longer = [
        f"{topic} keeps records {'for ever' if ms < 0 else f'for {_days(ms)}'}"
        for topic, ms in kept.items()
        if ms is not None and (ms < 0 or timedelta(milliseconds=ms) > span)
    ]
    if not longer:
        return Finding("server", "retention", True, remembered)
    text = (
        f"{remembered}, but {', '.join(longer)}: what is older than that is refused when offsets are moved back to it, "
        "and would be handled again if it were sent again; retention.days may be longer"
    )
    return Finding("server", "retention", None, text)


def _days(milliseconds: float) -> str:
    hours = milliseconds / 3_600_000
    return f"{hours / 24:g} days" if hours >= 48 else f"{hours:g} hours"


def _group(settings: Settings, inspection: Inspection) -> Finding:
    group = settings.consumer
    name, where = f"group {group}", f"{settings.source}: consumer: {group}"
    try:
        access = inspection.group(group)
    except Refused as error:
        return Finding("server", name, False, f"{where}: {error}")
    if access is None:
        return Finding("server", name, True, "not there yet; the first start creates it")
    if access.forbids("READ"):
        return Finding("server", name, False, f"{where}: this user may not READ the group; add the ACL")
    return Finding("server", name, True, f"{access.number} member(s)")


def _timing(settings: Settings, inspection: Inspection) -> Finding:
    """With the consumer protocol, the brokers decide how soon members learn of a rebalance, and of a dead member."""
    group = settings.consumer
    name = f"group {group}, timing"
    timing = inspection.group_timing(group)
    if timing is None:
        text = "the brokers do not report it; docs/performance.md says what it should be"
        return Finding("server", name, None, text)
    heartbeat, session = timing
    text = f"heartbeat {heartbeat / 1000:g} s, session {session / 1000:g} s"
    if heartbeat <= SLOWEST_HEARTBEAT_MS and session <= LONGEST_SESSION_MS:
        return Finding("server", name, True, text)
    command = (
        f"kafka-configs --bootstrap-server {settings.kafka.bootstrap_servers} --alter --entity-type groups "
        f"--entity-name {group} --add-config {HEARTBEAT}={BETTER_HEARTBEAT_MS},{SESSION}={BETTER_SESSION_MS}"
    )
    return Finding(
        "server",
        name,
        None,
        f"{text}: partitions that move stand still for up to the first, those of a killed process for the second. "
        f"Better: {command} (no less than the brokers' group.consumer.min.heartbeat.interval.ms and "
        "group.consumer.min.session.timeout.ms)",
    )


def _server(settings: Settings, server: connections.Server) -> Finding:
    if not server.durable:
        where = f"{settings.source}: database.url"
        text = f"{where}: synchronous_commit is off there: Postgres could lose what Kafka has as done"
        return Finding("server", "database", False, text)
    return Finding("server", "database", True, f"PostgreSQL {server.version} as {server.username}")


async def _schema(settings: Settings, connection: Connection, wanted: tuple[migrate.MigrationSet, ...]) -> Finding:
    try:
        pending = (await migrate.status(connection, wanted)).pending
    except SetupError as error:
        return Finding("server", "schema", False, f"{settings.source}: database.url: {error}")
    if pending:
        names = ", ".join(migration.label for migration in pending)
        text = f"{settings.source}: database.url: the database lacks {names}: run `processor migrate {settings.source}`"
        return Finding("server", "schema", False, text)
    return Finding("server", "schema", True, "as this code needs it")
