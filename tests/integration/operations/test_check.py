from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import pytest
from confluent_kafka.admin import (  # type: ignore[attr-defined]
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewTopic,
    ResourcePatternType,
    ResourceType,
)

from processor.stack import Stack

HANDLER = """
from typing import Any

from processor import Message


async def reserve(message: Message[dict[str, Any]], db: object) -> None: ...
"""


class Deployment:
    """A project folder whose configuration points at a real broker and an empty database."""

    def __init__(self, folder: Path, stack: Stack, database: str) -> None:
        self.folder = folder
        self.database = database
        self.topic = f"orders-{uuid.uuid4().hex[:8]}"
        self.environ = stack.environment() | {"PROCESSOR_DATABASE__URL": database}
        (folder / "shop.py").write_text(HANDLER)
        (folder / "orders.toml").write_text(
            f'consumer = "{self.topic}"\ntopic = "{self.topic}"\nhandlers.OrderPlaced = "shop:reserve"\n'
        )
        admin = AdminClient({"bootstrap.servers": stack.internal_bootstrap_servers})
        self.dead_letters = f"{self.topic}.{self.topic}.dlq"
        for made in admin.create_topics([NewTopic(self.topic, 3, 1), NewTopic(self.dead_letters, 1, 1)]).values():
            made.result(timeout=30)

    def processor(self, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
        return subprocess.run(
            [sys.executable, "-m", "processor", *arguments],
            cwd=self.folder,
            env=inherited | self.environ | environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def failures(self, **environ: str) -> list[str]:
        """What `check --connect` finds wrong; it must then exit with 1, say it in lines, and keep secrets."""
        done = self.processor("check", "orders.toml", "--connect", **environ)
        assert done.stderr == ""
        found = [line.removeprefix("✗ ") for line in done.stdout.splitlines() if line.startswith("✗ ")]
        assert done.returncode == (1 if found else 0)
        password = urlsplit(self.database).password
        assert password is None or password not in done.stdout
        return found

    def execute(self, sql: str) -> None:
        async def run() -> None:
            connection = await asyncpg.connect(self.database)
            try:
                await connection.execute(sql)
            finally:
                await connection.close()

        asyncio.run(run())


@pytest.fixture
def deployment(tmp_path: Path, stack: Stack, empty_database: str) -> Deployment:
    return Deployment(tmp_path, stack, empty_database)


def test_check_asks_for_migrate_and_is_content_afterwards(deployment: Deployment) -> None:
    (lacking,) = deployment.failures()
    assert lacking.startswith("orders.toml: database.url: the database lacks processor/0001_")
    assert lacking.endswith("run `processor migrate orders.toml`")
    assert deployment.processor("migrate", "orders.toml").returncode == 0
    done = deployment.processor("check", "orders.toml", "--connect")
    assert done.returncode == 0
    assert f"✓ topic {deployment.topic}: 3 partition(s), may be read" in done.stdout
    assert f"✓ dead-letter topic {deployment.dead_letters}: 1 partition(s), may be written" in done.stdout
    assert "✓ schema: as this code needs it" in done.stdout
    assert "– kafka write permissions: " in done.stdout


def test_check_changes_nothing(deployment: Deployment, stack: Stack) -> None:
    admin = AdminClient({"bootstrap.servers": stack.internal_bootstrap_servers})
    deployment.failures(PROCESSOR_TOPIC=f"{deployment.topic}-other")
    assert f"{deployment.topic}-other" not in admin.list_topics(timeout=30).topics
    groups = {group.group_id for group in admin.list_consumer_groups().result(timeout=30).valid}
    assert deployment.topic not in groups


def test_a_missing_topic_is_named_with_the_nearest_one(deployment: Deployment) -> None:
    deployment.processor("migrate", "orders.toml")
    (missing,) = deployment.failures(
        PROCESSOR_TOPIC=f"{deployment.topic}s", PROCESSOR_FAILURE__DEAD_LETTER_TOPIC=deployment.dead_letters
    )
    expected = f"orders.toml: topics: {deployment.topic}s does not exist; did you mean {deployment.topic}?"
    assert missing == expected


def set_group(stack: Stack, group: str, heartbeat_ms: int, session_ms: int) -> None:
    settings = {"consumer.heartbeat.interval.ms": heartbeat_ms, "consumer.session.timeout.ms": session_ms}
    entries = [ConfigEntry(n, str(v), incremental_operation=AlterConfigOpType.SET) for n, v in settings.items()]
    admin = AdminClient({"bootstrap.servers": stack.internal_bootstrap_servers})
    resource = ConfigResource(ResourceType.GROUP, group, incremental_configs=entries)
    for future in admin.incremental_alter_configs([resource]).values():
        future.result(timeout=30)


def test_slow_settings_of_a_group_whose_brokers_decide_are_reported_with_the_command_that_mends_them(
    deployment: Deployment, stack: Stack
) -> None:
    deployment.processor("migrate", "orders.toml")
    set_group(stack, deployment.topic, 5000, 45000)
    slow = deployment.processor("check", "orders.toml", "--connect", PROCESSOR_KAFKA__GROUP_PROTOCOL="consumer")
    assert slow.returncode == 0, "slow is not wrong"
    (line,) = [line for line in slow.stdout.splitlines() if f"group {deployment.topic}, timing" in line]
    assert line.startswith("– ")
    assert "heartbeat 5 s, session 45 s" in line
    settings = "consumer.heartbeat.interval.ms=250,consumer.session.timeout.ms=6000"
    assert f"--entity-type groups --entity-name {deployment.topic} --add-config {settings} " in line
    set_group(stack, deployment.topic, 250, 6000)
    good = deployment.processor("check", "orders.toml", "--connect", PROCESSOR_KAFKA__GROUP_PROTOCOL="consumer")
    assert f"✓ group {deployment.topic}, timing: heartbeat 0.25 s, session 6 s" in good.stdout


def test_the_classic_protocol_needs_nothing_from_the_brokers(deployment: Deployment) -> None:
    deployment.processor("migrate", "orders.toml")
    assert "timing" not in deployment.processor("check", "orders.toml", "--connect").stdout


def test_a_missing_dead_letter_topic_is_named_unless_none_is_wanted(deployment: Deployment) -> None:
    deployment.processor("migrate", "orders.toml")
    (missing,) = deployment.failures(PROCESSOR_FAILURE__DEAD_LETTER_TOPIC="{topic}.failed")
    assert missing == (
        f"orders.toml: failure.dead_letter_topic: {deployment.topic}.failed does not exist; create it, allow this user"
        ' to describe it, or set "" to keep failed messages as rows only'
    )
    assert deployment.failures(PROCESSOR_FAILURE__DEAD_LETTER_TOPIC="") == []


def test_one_dead_letter_topic_for_several_inputs_is_looked_at_once(deployment: Deployment) -> None:
    deployment.processor("migrate", "orders.toml")
    topics = f"{deployment.topic},{deployment.dead_letters}"  # any two that exist
    (missing,) = deployment.failures(PROCESSOR_TOPICS=topics, PROCESSOR_FAILURE__DEAD_LETTER_TOPIC="nowhere")
    assert missing.startswith("orders.toml: failure.dead_letter_topic: nowhere does not exist; ")


def test_output_topics_that_handlers_declare_are_looked_at(deployment: Deployment) -> None:
    deployment.processor("migrate", "orders.toml")
    config = deployment.folder / "orders.toml"
    declared = f'{{ call = "shop:reserve", outputs = ["{deployment.dead_letters}", "{deployment.topic}s"] }}'
    config.write_text(config.read_text().replace('"shop:reserve"', declared))
    (missing,) = deployment.failures()
    assert missing == (
        f"orders.toml: handlers.OrderPlaced.outputs: {deployment.topic}s does not exist; "
        f"did you mean {deployment.topic}?"
    )
    done = deployment.processor("check", "orders.toml", "--connect")
    assert f"✓ output topic {deployment.dead_letters}: 1 partition(s), may be written" in done.stdout


def test_topics_that_keep_records_for_longer_than_the_inbox_remembers_them_are_named(deployment: Deployment) -> None:
    deployment.processor("migrate", "orders.toml")

    def said(**environ: str) -> str:
        done = deployment.processor("check", "orders.toml", "--connect", **environ)
        assert done.returncode == 0, done.stdout
        (line,) = [line for line in done.stdout.splitlines() if line[2:].startswith("retention: ")]
        return line

    assert said() == "✓ retention: completed messages are remembered for 7 days"
    assert said(PROCESSOR_RETENTION__DAYS="0") == "✓ retention: completed messages are remembered for ever"
    shorter = said(PROCESSOR_RETENTION__HOURS="12")
    assert shorter.startswith(
        f"– retention: completed messages are remembered for 12 hours, but {deployment.topic} keeps records for 7 days,"
        f" {deployment.dead_letters} keeps records for 7 days: what is older than that is refused"
    )


def test_an_error_that_is_mapped_to_a_class_must_exist(deployment: Deployment) -> None:
    config = deployment.folder / "orders.toml"
    text = config.read_text()
    config.write_text(text + '[failure.classes]\n"builtins:ConnectionError" = "outage"\n"23505" = "poison"\n')
    done = deployment.processor("check", "orders.toml")
    assert done.returncode == 0
    assert "✓ failure.classes: builtins:ConnectionError, 23505" in done.stdout
    config.write_text(text + '[failure.classes]\n"builtins:ConectionError" = "outage"\n')
    done = deployment.processor("check", "orders.toml")
    assert done.returncode == 2
    assert "✗ orders.toml: failure.classes: " in done.stdout


def test_a_newer_database_is_refused(deployment: Deployment) -> None:
    deployment.processor("migrate", "orders.toml")
    deployment.execute("INSERT INTO processor_migrations VALUES ('', 'processor', 9999, 'future', 'x')")
    (newer,) = deployment.failures()
    assert "the database is newer than this code: it has processor/9999_future" in newer


def test_missing_privileges_are_named(deployment: Deployment) -> None:
    deployment.processor("migrate", "orders.toml")
    role = f"reader_{uuid.uuid4().hex[:8]}"
    deployment.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'reader-hunter2'")
    deployment.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA public TO {role}")
    parts = urlsplit(deployment.database)
    try:
        url = urlunsplit(parts._replace(netloc=f"{role}:reader-hunter2@{parts.netloc.rpartition('@')[2]}"))
        (lacking,) = deployment.failures(PROCESSOR_DATABASE__URL=url)
        assert lacking == "orders.toml: database.url: the role lacks rights: " + "; ".join(
            f"GRANT {', '.join(privileges)} ON public.{table} TO {role}"
            for privileges, tables in (
                (("DELETE", "INSERT"), ("log_ends", "parked_repeats")),
                (("DELETE", "INSERT", "UPDATE"), ("inbox", "partition_trouble", "unsent")),
                (
                    ("INSERT", "UPDATE"),
                    ("archived", "forgotten", "ledger", "pruning", "replay_ranges", "replays"),
                ),
            )
            for table in tables
        )
    finally:
        deployment.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"path": "/nowhere"}, "create the database or correct its name"),
        ({"user": "nobody:wrong-hunter2"}, "check user and password"),
    ],
)
def test_a_database_that_refuses_us_is_named_with_the_likely_fix(
    deployment: Deployment, change: dict[str, str], says: str
) -> None:
    parts = urlsplit(deployment.database)
    netloc = parts.netloc.rpartition("@")[2]
    netloc = f"{change['user']}@{netloc}" if "user" in change else parts.netloc
    url = urlunsplit(parts._replace(netloc=netloc, path=change.get("path", parts.path)))
    (refused,) = deployment.failures(PROCESSOR_DATABASE__URL=url)
    assert refused.startswith("orders.toml: database.url: cannot connect to postgresql://")
    assert says in refused
    assert "wrong-hunter2" not in refused


def test_a_database_with_asynchronous_commit_is_refused(deployment: Deployment) -> None:
    deployment.processor("migrate", "orders.toml")
    name = urlsplit(deployment.database).path[1:]
    deployment.execute(f"ALTER DATABASE {name} SET synchronous_commit = off")
    (unsafe,) = deployment.failures()
    assert "synchronous_commit is off there" in unsafe


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """Clients authenticate here, and may do only what an ACL allows; the plain listener may do everything."""
    authorizer = {
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
    }
    secured = Stack(tmp_path_factory.mktemp("secured"), sasl=True, tls=True, overrides=authorizer)
    secured.up(guarded=True)
    yield secured
    secured.down(purge=True)


def allow(stack: Stack, kind: ResourceType, name: str, operation: AclOperation) -> None:
    user = f"User:{stack.client_settings['sasl.username']}"
    rule = AclBinding(kind, name, ResourcePatternType.LITERAL, user, "*", operation, AclPermissionType.ALLOW)
    admin = AdminClient({"bootstrap.servers": stack.internal_bootstrap_servers})
    admin.create_acls([rule])[rule].result(timeout=30)


def test_a_broker_that_refuses_us_is_named_with_the_likely_fix(
    secured: Stack, tmp_path: Path, empty_database: str
) -> None:
    deployment = Deployment(tmp_path, secured, empty_database)
    deployment.processor("migrate", "orders.toml")
    (password, *_) = deployment.failures(PROCESSOR_KAFKA__CLIENT__SASL_PASSWORD="wrong-hunter2")
    assert password.startswith(f"orders.toml: kafka.bootstrap_servers: cannot use {secured.bootstrap_servers}: ")
    assert "check sasl.mechanism, sasl.username and sasl.password" in password
    assert "wrong-hunter2" not in password
    del deployment.environ["PROCESSOR_KAFKA__CLIENT__SSL_CA_LOCATION"]
    (untrusted,) = deployment.failures()
    assert "check security.protocol and the ssl.* keys" in untrusted


def test_permissions_the_broker_denies_are_named(secured: Stack, tmp_path: Path, empty_database: str) -> None:
    deployment = Deployment(tmp_path, secured, empty_database)
    deployment.processor("migrate", "orders.toml")
    topic, dead_letters, group = deployment.failures()
    assert topic.startswith(f"orders.toml: topics: {deployment.topic} does not exist; ")
    assert dead_letters.startswith(f"orders.toml: failure.dead_letter_topic: {deployment.dead_letters} does not exist")
    assert group.startswith(f"orders.toml: consumer: {deployment.topic}: GROUP_AUTHORIZATION_FAILED")
    allow(secured, ResourceType.TOPIC, deployment.topic, AclOperation.DESCRIBE)
    allow(secured, ResourceType.TOPIC, deployment.dead_letters, AclOperation.DESCRIBE)
    allow(secured, ResourceType.GROUP, deployment.topic, AclOperation.DESCRIBE)
    assert deployment.failures() == [
        f"orders.toml: topics: {deployment.topic}: this user may not READ it; add the ACL",
        f"orders.toml: failure.dead_letter_topic: {deployment.dead_letters}: this user may not WRITE it; add the ACL",
        f"orders.toml: consumer: {deployment.topic}: this user may not READ the group; add the ACL",
    ]
    allow(secured, ResourceType.TOPIC, deployment.topic, AclOperation.READ)
    allow(secured, ResourceType.TOPIC, deployment.dead_letters, AclOperation.WRITE)
    allow(secured, ResourceType.GROUP, deployment.topic, AclOperation.READ)
    assert deployment.failures() == []
