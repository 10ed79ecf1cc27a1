"""`processor check`: is this deployment described rightly, and do the servers agree?

Offline it reads the configuration, imports the handlers and lets librdkafka judge its own settings. With
`--connect` it also asks broker and database, read-only and each within a deadline. What cannot be asked
without a side effect is said, not guessed. (A cluster that never had a consumer group makes its own internal
offsets topic when it is first asked about one.)
"""

from __future__ import annotations

import asyncio
import difflib
import logging
import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal

import asyncpg
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AclOperation as Operation  # type: ignore[attr-defined]
from confluent_kafka.admin import AdminClient, ConfigResource  # type: ignore[attr-defined]
from confluent_kafka.admin import ResourceType as Resource  # type: ignore[attr-defined]

from processor.engine.failing import classify
from processor.errors import ConfigError, ProcessorError, SetupError
from processor.handling import registry
from processor.kafka import properties
from processor.kafka.cluster import Cluster
from processor.operations import topic_recreated
from processor.postgres import migrate, rights
from processor.settings.schema import Settings

DEADLINE_SECONDS = 10.0
# A name such as localhost may first be tried on an address nobody listens on.
SECOND_CHANCE_SECONDS = 2.0
# What a broker answers while it takes over a group, as after its start.
COORDINATOR_MOVES = frozenset({"NOT_COORDINATOR", "COORDINATOR_LOAD_IN_PROGRESS", "COORDINATOR_NOT_AVAILABLE"})
HOPELESS = frozenset({"_AUTHENTICATION", "_SSL"})

# What the broker decides for the members of a group, and what is good enough.
HEARTBEAT, SESSION = "consumer.heartbeat.interval.ms", "consumer.session.timeout.ms"
SLOWEST_HEARTBEAT_MS, LONGEST_SESSION_MS = 500, 10_000
BETTER_HEARTBEAT_MS, BETTER_SESSION_MS = 250, 6_000

SERVER_STATE = """
    SELECT current_setting('server_version') AS version, current_user AS username,
           current_setting('synchronous_commit') AS synchronous_commit
"""

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
    """Everything that can be told without a server."""
    topics = ", ".join(settings.topics)
    read = Finding("configuration", settings.source, True, f"consumer {settings.consumer}, topics {topics}")
    return [read, *_handlers(settings), *_classes(settings), *_clients(settings), *_migrations(settings)]


def connected(settings: Settings) -> list[Finding]:
    """Ask both servers; whatever they answer is a finding, never an exception."""
    findings = [*broker(settings), *asyncio.run(database(settings))]
    if exit_code(findings) == 0:
        findings += asyncio.run(same_topics(settings))
    return findings


def broker(settings: Settings) -> list[Finding]:
    """Reachable, authenticated, topics there, and allowed to read them, or to write dead letters to them."""
    errors: list[KafkaError] = []
    silent = logging.Logger("processor.operations.check", level=logging.CRITICAL + 1)
    config = settings.kafka.admin_config() | {"error_cb": errors.append, "logger": silent}
    servers = settings.kafka.bootstrap_servers
    where = f"{settings.source}: kafka.bootstrap_servers"
    try:
        admin = AdminClient(config)
        cluster = _answer(admin, admin.describe_cluster(request_timeout=DEADLINE_SECONDS), errors)
        if cluster is None:
            return [Finding("server", "kafka", False, f"{where}: {_unreachable(settings, servers, errors)}")]
        known = admin.list_topics(timeout=DEADLINE_SECONDS).topics
        findings = [Finding("server", "kafka", True, f"{servers}, {len(cluster.nodes)} broker(s)")]
        findings += [_topic(settings, admin, topic, list(known), errors) for topic in settings.topics]
        dead_letters = dict.fromkeys(filter(None, map(settings.dead_letter_topic, settings.topics)))
        findings += [_dead_letter_topic(settings, admin, topic, list(known), errors) for topic in dead_letters]
        findings += _output_topics(settings, admin, list(known), errors)
        findings.append(_group(settings, admin, errors))
        if settings.kafka.group_protocol == "consumer":
            findings += _timing(settings, admin, errors)
    except KafkaException as error:
        text = settings.redact(str(error.args[0].str()))
        return [Finding("server", "kafka", False, f"{where}: cannot use {servers}: {text}")]
    text = "writing outputs and the transactional id: brokers tell only those who try; not tried here"
    return [*findings, Finding("server", "kafka write permissions", None, text)]


async def database(settings: Settings) -> list[Finding]:
    """Reachable, writable, the schema as this code needs it, and allowed to use it."""
    try:
        async with asyncio.timeout(DEADLINE_SECONDS), migrate.connected(settings) as connection:
            state = await connection.fetchrow(SERVER_STATE)
            assert state is not None
            findings = [_server_state(settings, state)]
            if grants := await rights.missing(connection, settings.database.schema):
                text = f"{settings.source}: database.url: {rights.lacks(grants)}"
                return [*findings, Finding("server", "database permissions", False, text)]
            findings.append(await _schema(settings, connection, migrate.sets(settings)))
            if findings[-1].ok:  # where there are no tables, nothing can be said of them
                text = "the processor's tables may be written"
                findings.append(Finding("server", "database permissions", True, text))
            return findings
    except TimeoutError:
        text = f"{settings.source}: database.url: no answer within {DEADLINE_SECONDS:.0f} s"
    except (SetupError, ConfigError) as error:
        text = str(error)
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        text = migrate.unreachable(settings, error)
    return [Finding("server", "database", False, text)]


async def same_topics(settings: Settings) -> list[Finding]:
    """Whether the topics are those that were read before, and not others that have got their names."""
    where = f"{settings.source}: topics"
    cluster = Cluster(settings.kafka, settings.consumer)
    try:
        async with migrate.connected(settings) as connection:
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
        classify.Judge(settings)
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


def _answer(admin: AdminClient, future: Future[Any], errors: list[KafkaError]) -> Any:
    """The result, or None as soon as it is clear that there will be none."""
    started = time.monotonic()
    while not future.done():
        admin.poll(0.05)
        waited = time.monotonic() - started
        names = {error.name() for error in errors}
        hopeless = not HOPELESS.isdisjoint(names)
        down = "_ALL_BROKERS_DOWN" in names and waited > SECOND_CHANCE_SECONDS
        if hopeless or down or waited > DEADLINE_SECONDS:
            return None
    return future.result()


def _unreachable(settings: Settings, servers: str, errors: list[KafkaError]) -> str:
    by_name = {error.name(): error for error in errors}
    if error := by_name.get("_AUTHENTICATION"):
        fix = "check sasl.mechanism, sasl.username and sasl.password under kafka.client"
    elif error := by_name.get("_SSL"):
        fix = "check security.protocol and the ssl.* keys under kafka.client"
    elif error := by_name.get("_RESOLVE"):
        fix = "is the host name right?"
    else:
        error = by_name.get("_TRANSPORT") or next(iter(errors), None)
        fix = "is the broker running, the address right, and security.protocol what it expects?"
    reason = settings.redact(str(error.str())) if error else f"no answer within {DEADLINE_SECONDS:.0f} s"
    return f"cannot use {servers}: {' '.join(reason.split())}; {fix}"


def _topic(settings: Settings, admin: AdminClient, topic: str, known: list[str], errors: list[KafkaError]) -> Finding:
    name, where = f"topic {topic}", f"{settings.source}: topics"
    if topic not in known:
        near = difflib.get_close_matches(topic, known, n=1)
        hint = f"did you mean {near[0]}?" if near else "create it, or allow this user to describe it"
        return Finding("server", name, False, f"{where}: {topic} does not exist; {hint}")
    return _permitted(admin, topic, Operation.READ, name, where, errors)


def _dead_letter_topic(
    settings: Settings, admin: AdminClient, topic: str, known: list[str], errors: list[KafkaError]
) -> Finding:
    name, where = f"dead-letter topic {topic}", f"{settings.source}: failure.dead_letter_topic"
    if topic not in known:
        # No guess at a near name: that would be the dead-letter topic of somebody else.
        hint = 'create it, allow this user to describe it, or set "" to keep failed messages as rows only'
        return Finding("server", name, False, f"{where}: {topic} does not exist; {hint}")
    return _permitted(admin, topic, Operation.WRITE, name, where, errors)


def _output_topics(
    settings: Settings, admin: AdminClient, known: list[str], errors: list[KafkaError]
) -> Iterator[Finding]:
    """Those that handlers declare."""
    where = {
        topic: f"{settings.source}: handlers.{type_}.outputs"
        for type_, handler in settings.handlers.items()
        for topic in handler.outputs
    }
    for topic, key in where.items():
        name = f"output topic {topic}"
        if topic in known:
            yield _permitted(admin, topic, Operation.WRITE, name, key, errors)
        else:
            near = difflib.get_close_matches(topic, known, n=1)
            hint = f"did you mean {near[0]}?" if near else "create it, or allow this user to describe it"
            yield Finding("server", name, False, f"{key}: {topic} does not exist; {hint}")


def _permitted(
    admin: AdminClient, topic: str, operation: Operation, name: str, where: str, errors: list[KafkaError]
) -> Finding:
    asked = admin.describe_topics(
        TopicCollection([topic]), include_authorized_operations=True, request_timeout=DEADLINE_SECONDS
    )
    try:
        described = _answer(admin, asked[topic], errors)
    except KafkaException as error:
        return Finding("server", name, False, f"{where}: {topic}: {error.args[0].name()}: {error.args[0].str()}")
    if described is None:
        return Finding("server", name, False, f"{where}: {topic}: no answer from the broker")
    if _forbidden(operation, described.authorized_operations):
        return Finding("server", name, False, f"{where}: {topic}: this user may not {operation.name} it; add the ACL")
    use = "read" if operation is Operation.READ else "written"
    return Finding("server", name, True, f"{len(described.partitions)} partition(s), may be {use}")


def _group(settings: Settings, admin: AdminClient, errors: list[KafkaError]) -> Finding:
    group = settings.consumer
    name, where = f"group {group}", f"{settings.source}: consumer: {group}"
    deadline = time.monotonic() + DEADLINE_SECONDS
    while True:
        asked = admin.describe_consumer_groups(
            [group], include_authorized_operations=True, request_timeout=DEADLINE_SECONDS
        )
        try:
            described = _answer(admin, asked[group], errors)
            break
        except KafkaException as error:
            refused = error.args[0]
        if refused.code() == KafkaError.GROUP_ID_NOT_FOUND:
            return Finding("server", name, True, "not there yet; the first start makes it")
        if refused.name() not in COORDINATOR_MOVES or time.monotonic() > deadline:
            return Finding("server", name, False, f"{where}: {refused.name()}: {refused.str()}")
        admin.poll(0.1)
    if described is None:
        return Finding("server", name, False, f"{where}: no answer from the broker")
    if _forbidden(Operation.READ, described.authorized_operations):
        return Finding("server", name, False, f"{where}: this user may not READ the group; add the ACL")
    return Finding("server", name, True, f"{len(described.members)} member(s)")


def _timing(settings: Settings, admin: AdminClient, errors: list[KafkaError]) -> Iterator[Finding]:
    """With this protocol the brokers decide how soon a member hears of a rebalance, and how late it is missed."""
    group = settings.consumer
    name = f"group {group}, timing"
    asked = admin.describe_configs([ConfigResource(Resource.GROUP, group)], request_timeout=DEADLINE_SECONDS)
    try:
        (future,) = asked.values()
        found = _answer(admin, future, errors) or {}
        heartbeat, session = (int(found[setting].value) for setting in (HEARTBEAT, SESSION))
    except (KafkaException, KeyError):
        yield Finding("server", name, None, "the brokers do not tell; docs/performance.md says what they should have")
        return
    text = f"heartbeat {heartbeat / 1000:g} s, session {session / 1000:g} s"
    if heartbeat <= SLOWEST_HEARTBEAT_MS and session <= LONGEST_SESSION_MS:
        yield Finding("server", name, True, text)
        return
    command = (
        f"kafka-configs --bootstrap-server {settings.kafka.bootstrap_servers} --alter --entity-type groups "
        f"--entity-name {group} --add-config {HEARTBEAT}={BETTER_HEARTBEAT_MS},{SESSION}={BETTER_SESSION_MS}"
    )
    yield Finding(
        "server",
        name,
        None,
        f"{text}: partitions that move stand still for up to the one, those of a killed process for the other. "
        f"Better: {command} (no less than the brokers' group.consumer.min.heartbeat.interval.ms and "
        "group.consumer.min.session.timeout.ms)",
    )


def _forbidden(operation: Operation, allowed: list[Operation] | None) -> bool:
    """Brokers that do not tell leave this empty: then nothing is known, and nothing is claimed."""
    return bool(allowed) and not {operation, Operation.ALL}.intersection(allowed or ())


def _server_state(settings: Settings, state: Any) -> Finding:
    where = f"{settings.source}: database.url"
    if state["synchronous_commit"] == "off":
        text = f"{where}: synchronous_commit is off there: Postgres could forget what Kafka was told is done"
        return Finding("server", "database", False, text)
    return Finding("server", "database", True, f"PostgreSQL {state['version']} as {state['username']}")


async def _schema(settings: Settings, connection: Any, wanted: tuple[migrate.MigrationSet, ...]) -> Finding:
    try:
        pending = (await migrate.status(connection, wanted)).pending
    except SetupError as error:
        return Finding("server", "schema", False, f"{settings.source}: database.url: {error}")
    if pending:
        names = ", ".join(migration.label for migration in pending)
        text = f"{settings.source}: database.url: the database lacks {names}: run `processor migrate {settings.source}`"
        return Finding("server", "schema", False, text)
    return Finding("server", "schema", True, "as this code needs it")
