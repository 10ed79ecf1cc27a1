from __future__ import annotations

import ctypes
import json
import os
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from confluent_kafka import cimpl
from pydantic import ValidationError

from processor.errors import ConfigError
from processor.kafka import properties
from processor.settings import librdkafka
from processor.settings.database import one_by_one
from processor.settings.kafka import KafkaSettings
from processor.settings.load import load
from processor.settings.schema import BatchSettings, RetrySettings, Settings
from processor.settings.secrets import hide_password
from tests.support.command import processor

PASSWORD = "correct-horse-battery"


def toml(
    *,
    top: str = 'consumer = "inventory"\ntopic = "orders"',
    handlers: str = 'OrderPlaced = "handlers.inventory:reserve"',
    message: str = "",
    kafka: str = 'bootstrap_servers = "localhost:9092"',
    tables: str = "",
    database: str = f'url = "postgresql://inventory:{PASSWORD}@localhost:5432/stock"',
    batch: str = "",
) -> str:
    return "\n".join(
        [
            top,
            f"[handlers]\n{handlers}",
            f"[message]\n{message}",
            f"[kafka]\n{kafka}\n{tables}",
            f"[database]\n{database}",
            f"[batch]\n{batch}",
        ]
    )


def settings(tmp_path: Path, text: str = "", environ: dict[str, str] | None = None) -> Settings:
    file = tmp_path / "orders.toml"
    file.write_text(text or toml())
    return load(file, environ or {}, properties.refusal)


@dataclass(frozen=True)
class Bad:
    """A configuration with one mistake, and what its one line of error must say."""

    key: str
    says: str
    text: str = ""
    environ: dict[str, str] = field(default_factory=dict)


KAFKA = 'bootstrap_servers = "localhost:9092"'
URL = f'url = "postgresql://inventory:{PASSWORD}@localhost:5432/stock"'


def kafka(line: str, table: str = "client") -> str:
    return toml(tables=f"[kafka.{table}]\nsasl.password = '{PASSWORD}'\n{line}")


def failing(tables: str) -> str:
    return toml() + "\n" + tables


BAD = {
    # spelling
    "unknown top-level key": Bad("consmer", "did you mean consumer?", 'consmer = "x"\n' + toml(top='topic = "a"')),
    "unknown table": Bad("kafak", "did you mean kafka?", toml() + "\n[kafak]\na = 1"),
    "the key source is not the user's": Bad("source", "unknown key", 'source = "x"\n' + toml()),
    "unknown key in a table": Bad(
        "kafka.bootstrap_server",
        "did you mean kafka.bootstrap_servers?",
        toml(kafka='bootstrap_server = "localhost:9092"'),
    ),
    "key of another table": Bad(
        "batch.bootstrap_servers",
        "did you mean kafka.bootstrap_servers?",
        toml(batch="bootstrap_servers = 1"),
    ),
    "key without any likeness": Bad("batch.xyz", "valid here: max_messages", toml(batch="xyz = 1")),
    "unknown key of a handler": Bad(
        "handlers.A.inbx",
        "did you mean handlers.A.inbox?",
        toml(handlers='A = { call = "a:b", inbx = false }'),
    ),
    "unknown key of database": Bad(
        "database.passwrd_file",
        "did you mean database.password_file?",
        toml(database=f"{URL}\npasswrd_file = 'x'"),
    ),
    # missing and malformed
    "required key missing": Bad("kafka.bootstrap_servers", "PROCESSOR_KAFKA__BOOTSTRAP_SERVERS", toml(kafka="")),
    "no topic": Bad("topic", "is required", toml(top='consumer = "a"')),
    "topic and topics": Bad("topic", "either topic or topics", toml(top='consumer = "a"\ntopic = "a"\ntopics = ["b"]')),
    "no topics": Bad("topics", "names no topic", toml(top='consumer = "a"\ntopics = []')),
    "topic twice": Bad("topics", "twice", toml(top='consumer = "a"\ntopics = ["b", "b"]')),
    "illegal topic": Bad("topic", "no topic name", toml(top='consumer = "a"\ntopic = "^orders.*"')),
    "illegal consumer": Bad("consumer", "1 to 100", toml(top='consumer = "a b"\ntopic = "a"')),
    "no handler": Bad("handlers", "names no handler", toml(handlers="")),
    "handler without function": Bad("handlers.A.call", "module:function", toml(handlers='A = "handlers.a"')),
    "dotted type unquoted": Bad("handlers.order", "in quotes", toml(handlers='order.placed = "a:b"')),
    "text instead of a number": Bad("batch.linger_ms", "integer", toml(batch='linger_ms = "soon"')),
    "profile nobody has heard of": Bad(
        "profile", "throughput", toml(top='consumer = "a"\ntopic = "a"\nprofile = "fast"')
    ),
    "profile that is no name": Bad(
        "profile", "latency", toml(top='consumer = "a"\ntopic = "a"\nprofile = ["latency"]')
    ),
    "no concurrency": Bad(
        "concurrency", "greater than or equal to 1", toml(top='consumer = "a"\ntopic = "a"\nconcurrency = 0')
    ),
    "too much concurrency": Bad("concurrency", "1000", toml(top='consumer = "a"\ntopic = "a"\nconcurrency = 1001')),
    "zero": Bad("batch.max_messages", "greater than 0", toml(batch="max_messages = 0")),
    "buffer below one batch": Bad("batch.buffer_bytes", "batch.max_bytes", toml(batch="buffer_bytes = 1000")),
    "value instead of a table": Bad("run", "must be a table", "run = 1\n" + toml()),
    "session timeout with the new protocol": Bad(
        "kafka.session_timeout_ms",
        "the broker decides",
        toml(kafka=f'{KAFKA}\ngroup_protocol = "consumer"\nsession_timeout_ms = 1'),
    ),
    # choices
    "unknown choice": Bad("message.on_collision", "did you mean skip?", toml(message='on_collision = "skipp"')),
    "unknown strategy": Bad("message.id", "did you mean header:?", toml(message='id = ["heder:message-id"]')),
    "strategy of ids used for types": Bad(
        "message.type", "valid: header:, payload:/, constant:", toml(message='type = ["offset"]')
    ),
    "header without a name": Bad("message.id", "header:NAME", toml(message='id = ["header:"]')),
    "bad pointer": Bad("message.id", "no JSON pointer", toml(message='id = ["payload:event_id"]')),
    "template without field": Bad("message.id", "names no field", toml(message='id = ["business:order"]')),
    "template with open brace": Bad("message.id", "unbalanced", toml(message='id = ["business:{order"]')),
    "template with doubled braces": Bad("message.id", "unbalanced", toml(message='id = ["business:{{a}}:{order_id}"]')),
    "template with index": Bad("message.id", "no plain name", toml(message='id = ["business:{0}"]')),
    "strategy that is never reached": Bad("message.id", "never used", toml(message='id = ["offset", "header:id"]')),
    # what becomes of failures
    "class nobody has heard of": Bad(
        "failure.classes.23505", "did you mean poison?", failing('[failure.classes]\n"23505" = "posion"')
    ),
    "too long for a SQLSTATE": Bad("failure.classes", "SQLSTATE", failing('[failure.classes]\n"235055" = "poison"')),
    "too short for a SQLSTATE": Bad("failure.classes", "SQLSTATE", failing('[failure.classes]\n"2" = "poison"')),
    "exception without its module": Bad(
        "failure.classes", "module:Exception", failing('[failure.classes]\n"ConnectError" = "outage"')
    ),
    "policy nobody has heard of": Bad(
        "failure.policy", "did you mean park-key?", failing('[failure]\npolicy = "park"')
    ),
    "dead-letter topic with another placeholder": Bad(
        "failure.dead_letter_topic", "{topic} and {consumer}", failing('[failure]\ndead_letter_topic = "{group}.dlq"')
    ),
    "dead-letter topic with a blank": Bad(
        "failure.dead_letter_topic", "topic name", failing('[failure]\ndead_letter_topic = "dead letters"')
    ),
    "dead letters into the input topic": Bad(
        "failure.dead_letter_topic", "come in again", failing('[failure]\ndead_letter_topic = "{topic}"')
    ),
    "dead letters into a topic that is read too": Bad(
        "failure.dead_letter_topic", "endless loop", failing('[failure]\ndead_letter_topic = "orders"')
    ),
    "dead-letter topic whose name gets too long": Bad(
        "failure.dead_letter_topic", "249 at most", failing(f'[failure]\ndead_letter_topic = "{{topic}}{"x" * 248}"')
    ),
    "quarantine at the first start": Bad(
        "failure.quarantine_after", "greater than or equal to 2", failing("[failure]\nquarantine_after = 1")
    ),
    "more than all of the budget": Bad(
        "failure.budget_percent", "less than or equal to 100", failing("[failure]\nbudget_percent = 101")
    ),
    "no attempt at all": Bad("retry.attempts", "greater than or equal to 1", failing("[retry]\nattempts = 0")),
    "longest delay below the first": Bad(
        "retry.max_delay_ms", "at least first_delay_ms", failing("[retry]\nfirst_delay_ms = 200\nmax_delay_ms = 100")
    ),
    "first delay above the longest one's default": Bad(
        "retry.max_delay_ms", "at least first_delay_ms", failing("[retry]\nfirst_delay_ms = 60_001")
    ),
    "longest delay of a type below its first": Bad(
        "handlers.A.retry.max_delay_ms",
        "at least first_delay_ms",
        toml(handlers='A = { call = "a:b", retry = { first_delay_ms = 200, max_delay_ms = 100 } }'),
    ),
    "number instead of a type's retry table": Bad(
        "handlers.A.retry", "must be a table", toml(handlers='A = { call = "a:b", retry = 3 }')
    ),
    "no time for a handler": Bad(
        "handlers.A.timeout_ms", "greater than 0", toml(handlers='A = { call = "a:b", timeout_ms = 0 }')
    ),
    "effect without inbox": Bad(
        "handlers.A", "effect needs the inbox", toml(handlers='A = { call = "a:b", effect = true, inbox = false }')
    ),
    "no lease": Bad("effects.lease_ms", "greater than 0", failing("[effects]\nlease_ms = 0")),
    # unsafe for exactly-once
    "auto commit": Bad("kafka.client.enable.auto.commit", "must stay false", kafka("enable.auto.commit = true")),
    "auto commit, legacy name": Bad(
        "kafka.client.auto.commit.enable", "must stay false", kafka("'auto.commit.enable' = 'true'")
    ),
    "auto offset store": Bad(
        "kafka.consumer.enable.auto.offset.store",
        "must stay false",
        kafka("enable.auto.offset.store = true", "consumer"),
    ),
    "read_uncommitted": Bad(
        "kafka.consumer.isolation.level",
        "must stay read_committed",
        kafka("isolation.level = 'read_uncommitted'", "consumer"),
    ),
    "acks below all": Bad("kafka.producer.acks", "must stay all", kafka("acks = 1", "producer")),
    "acks by its other name": Bad(
        "kafka.producer.request.required.acks",
        "must stay all",
        kafka("request.required.acks = 0", "producer"),
    ),
    "idempotence off": Bad(
        "kafka.producer.enable.idempotence", "must stay true", kafka("enable.idempotence = false", "producer")
    ),
    "transactional id by hand": Bad(
        "kafka.producer.transactional.id", "leases its own", kafka("transactional.id = 'x'", "producer")
    ),
    "group id": Bad("kafka.consumer.group.id", "key consumer", kafka("group.id = 'x'", "consumer")),
    "group protocol": Bad("kafka.client.group.protocol", "kafka.group_protocol", kafka("group.protocol = 'x'")),
    "session timeout": Bad(
        "kafka.client.session.timeout.ms", "kafka.session_timeout_ms", kafka("session.timeout.ms = 1")
    ),
    "transaction timeout": Bad(
        "kafka.client.transaction.timeout.ms",
        "kafka.transaction_timeout_ms",
        kafka("transaction.timeout.ms = 1"),
    ),
    "offset reset": Bad(
        "kafka.consumer.auto.offset.reset", "kafka.start", kafka("auto.offset.reset = 'latest'", "consumer")
    ),
    "bootstrap servers": Bad(
        "kafka.client.bootstrap.servers", "kafka.bootstrap_servers", kafka("bootstrap.servers = 'a'")
    ),
    "broker list": Bad(
        "kafka.client.metadata.broker.list", "kafka.bootstrap_servers", kafka("metadata.broker.list = 'a'")
    ),
    "assignment strategy": Bad(
        "kafka.client.partition.assignment.strategy",
        "cooperative-sticky",
        kafka("partition.assignment.strategy = 'range'"),
    ),
    "in flight": Bad("kafka.producer.max.in.flight", "at most 5", kafka("max.in.flight = 6", "producer")),
    "callback": Bad("kafka.client.error_cb", "takes a function", kafka("error_cb = 'handlers:oops'")),
    "plugin": Bad("kafka.client.plugin.library.paths", "plugin", kafka("plugin.library.paths = 'x.so'")),
    "asynchronous commit": Bad(
        "database.settings.synchronous_commit",
        "must not be off",
        toml(database=f"{URL}\n[database.settings]\nsynchronous_commit = 'off'"),
    ),
    "asynchronous commit in the URL": Bad(
        "database.url",
        "must not be off",
        toml(database="url = 'postgres://localhost/a?synchronous_commit=off'"),
    ),
    # librdkafka's own
    "unknown property": Bad(
        "kafka.client.sasl.mecanism", "did you mean sasl.mechanism?", kafka("sasl.mecanism = 'PLAIN'")
    ),
    "property of the producer": Bad(
        "kafka.consumer.linger.ms", "move it to kafka.producer.linger.ms", kafka("linger.ms = 1", "consumer")
    ),
    "property of the consumer": Bad(
        "kafka.producer.fetch.min.bytes",
        "move it to kafka.consumer.fetch.min.bytes",
        kafka("fetch.min.bytes = 1", "producer"),
    ),
    "value librdkafka refuses": Bad(
        "kafka.client.security.protocol", "librdkafka refuses", kafka("security.protocol = 'TLS'")
    ),
    "list as a property": Bad("kafka.client.debug", "string, a number or a boolean", kafka("debug = ['a']")),
    # database
    "no Postgres URL": Bad("database.url", "postgresql://", toml(database=f"url = 'mysql://a:{PASSWORD}@h/b'")),
    "no URL at all": Bad("database.url", "postgresql://", toml(database=f"url = 'a:{PASSWORD}@h/b'")),
    "password not encoded": Bad(
        "database.url", "percent-encode", toml(database=f"url = 'postgresql://a:{PASSWORD}/1@h/b'")
    ),
    "unknown sslmode": Bad(
        "database.url", "sslmode", toml(database=f"url = 'postgresql://a:{PASSWORD}@h/b?sslmode=on'")
    ),
    "a server that need not take writes": Bad(
        "database.url", "the processor writes", toml(database="url = 'postgresql://a,b/c?target_session_attrs=any'")
    ),
    "hosts in the query": Bad(
        "database.url", "before the path", toml(database="url = 'postgresql:///c?host=a,b&port=1,2'")
    ),
    "certificate missing": Bad(
        "database.tls.sslrootcert", "no such file", toml(database=f"{URL}\ntls.sslrootcert = 'nowhere.pem'")
    ),
    "migrations missing": Bad(
        "database.migrations", "no such folder", toml(database=f"{URL}\nmigrations = ['nowhere']")
    ),
    # secrets from files
    "secret file missing": Bad("database.url_file", "nowhere: cannot be read", toml(database="url_file = 'nowhere'")),
    "secret file missing for Kafka": Bad(
        "kafka.client.sasl.oauthbearer.client.secret_file",
        "nowhere: cannot be read",
        kafka("sasl.oauthbearer.client.secret_file = 'nowhere'"),
    ),
    "secret and its file": Bad(
        "kafka.client.sasl.password_file", "not both", kafka("'sasl.password_file' = 'nowhere'")
    ),
    "file for what is no secret": Bad(
        "kafka.client.sasl.username_file",
        "did you mean sasl.username?",
        kafka("sasl.username_file = 'nowhere'"),
    ),
    # environment
    "unknown variable": Bad(
        "kafka.bootstrap_server (from PROCESSOR_KAFKA__BOOTSTRAP_SERVER)",
        "did you mean kafka.bootstrap_servers?",
        environ={"PROCESSOR_KAFKA__BOOTSTRAP_SERVER": PASSWORD},
    ),
    "one underscore too few": Bad(
        "PROCESSOR_DATABASE_URL",
        "did you mean PROCESSOR_DATABASE__URL?",
        environ={"PROCESSOR_DATABASE_URL": PASSWORD},
    ),
    "misspelt section in a variable": Bad(
        "PROCESSOR_KAFAK__START",
        "did you mean PROCESSOR_KAFKA__START?",
        environ={"PROCESSOR_KAFAK__START": "latest"},
    ),
    "bad value in a variable": Bad(
        "batch.max_bytes (from PROCESSOR_BATCH__MAX_BYTES)",
        "integer",
        environ={"PROCESSOR_BATCH__MAX_BYTES": PASSWORD},
    ),
    "text for a whole table": Bad(
        "batch (from PROCESSOR_BATCH)", "PROCESSOR_BATCH__", environ={"PROCESSOR_BATCH": PASSWORD}
    ),
    "unsafe property in a variable": Bad(
        "kafka.client.enable.auto.commit (from PROCESSOR_KAFKA__CLIENT__ENABLE_AUTO_COMMIT)",
        "must stay false",
        environ={"PROCESSOR_KAFKA__CLIENT__ENABLE_AUTO_COMMIT": "true"},
    ),
    "unknown property in a variable": Bad(
        "kafka.client.sasl.mecanism (from PROCESSOR_KAFKA__CLIENT__SASL_MECANISM)",
        "did you mean sasl.mechanism?",
        environ={"PROCESSOR_KAFKA__CLIENT__SASL_MECANISM": "PLAIN"},
    ),
    "secret file missing, named by a variable": Bad(
        "database.url_file (from PROCESSOR_DATABASE__URL_FILE)",
        "nowhere: cannot be read",
        environ={"PROCESSOR_DATABASE__URL_FILE": "nowhere"},
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_configuration_is_refused_in_one_line_that_names_file_and_key(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    bad = BAD[name]
    Path("orders.toml").write_text(bad.text or toml())
    with pytest.raises(ConfigError) as caught:
        load("orders.toml", bad.environ, properties.refusal)
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"orders.toml: {bad.key}: ")
    assert bad.says in line
    assert PASSWORD not in line
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "name",
    [
        "unknown key in a table",
        "auto commit",
        "read_uncommitted",
        "acks below all",
        "idempotence off",
        "transactional id by hand",
        "unknown property",
        "password not encoded",
        "secret file missing",
        "unknown variable",
        "bad value in a variable",
    ],
)
def test_the_process_says_so_in_one_line_and_exits_with_2(name: str, tmp_path: Path) -> None:
    bad = BAD[name]
    (tmp_path / "orders.toml").write_text(bad.text or toml())
    done = processor(tmp_path, "check", "orders.toml", environ=bad.environ)
    assert_one_line(done, bad.key)


@pytest.mark.parametrize("command", ["run", "migrate"])
def test_every_command_refuses_a_bad_configuration_alike(command: str, tmp_path: Path) -> None:
    bad = BAD["acks below all"]
    (tmp_path / "orders.toml").write_text(bad.text)
    assert_one_line(processor(tmp_path, command, environ={"PROCESSOR_CONFIG": "orders.toml"}), bad.key)


def assert_one_line(done: subprocess.CompletedProcess[str], key: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: orders.toml: {key}: ")
    assert PASSWORD not in line


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"consumer = \n", "not valid TOML: Invalid value (at line 1, column 12)"),
        (b"consumer = '\xff'\n", "not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, says: str) -> None:
    file = tmp_path / "orders.toml"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load(file, {})
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{file}: ")
    assert says in line


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a directory"):
        load(tmp_path, {})


def test_a_misspelt_file_name_brings_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "orders.toml").write_text(toml())
    with pytest.raises(ConfigError, match=r"did you mean .*orders\.toml\?"):
        load(tmp_path / "order.toml", {})


def test_several_problems_are_one_line_each_and_unknown_keys_come_first(tmp_path: Path) -> None:
    text = toml(top='consumer = "a b"\ntopic = "orders"', batch="max_mesages = 1") + "\n[run]\nstop_timeout_ms = 0"
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, text)
    keys = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert keys == ["batch.max_mesages", "consumer", "run.stop_timeout_ms"]


def test_defaults(tmp_path: Path) -> None:
    loaded = settings(tmp_path)
    assert loaded.source == str(tmp_path / "orders.toml")
    assert loaded.topics == ("orders",)
    assert loaded.message.id == ("header:message-id", "offset")
    assert loaded.batch == BatchSettings()
    assert loaded.handlers["OrderPlaced"].inbox
    assert loaded.kafka.start == "earliest"


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    loaded = settings(tmp_path)
    with pytest.raises(ValidationError, match="frozen"):
        loaded.batch.max_messages = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        loaded.consumer = "other"  # type: ignore[misc]


def test_the_environment_overrides_the_file(tmp_path: Path) -> None:
    environ = {
        "PROCESSOR_TOPICS": "orders-eu, orders-us",
        "PROCESSOR_KAFKA__BOOTSTRAP_SERVERS": "broker:9092",
        "PROCESSOR_KAFKA__CLIENT__SECURITY_PROTOCOL": "SASL_SSL",
        "PROCESSOR_KAFKA__CLIENT__SASL__USERNAME": "me",
        "PROCESSOR_KAFKA__CLIENT__LOG_LEVEL": "3",
        "PROCESSOR_DATABASE__URL": "postgresql://db/stock",
        "PROCESSOR_DATABASE__SETTINGS__WORK_MEM": "64MB",
        "PROCESSOR_BATCH__MAX_MESSAGES": "7",
        "PROCESSOR_MESSAGE__ID": '["business:{a},{b}", "offset"]',
        "PROCESSOR_MESSAGE__SCOPE_BY_TYPE": "true",
        "PROCESSOR_HANDLERS__OrderPlaced": "other:place",
        # not settings
        "PROCESSOR_LOG_LEVEL": "debug",
        "PROCESSOR_FAILPOINTS": "x",
        "PROCESSOR_SERVICE_HOST": "10.0.0.1",
        "PROCESSOR_PORT_80_TCP": "tcp://10.0.0.1:80",
    }
    loaded = settings(tmp_path, kafka("security.protocol = 'PLAINTEXT'"), environ)
    assert loaded.topics == ("orders-eu", "orders-us")
    assert loaded.kafka.bootstrap_servers == "broker:9092"
    client = loaded.kafka.admin_config()
    assert client["security.protocol"] == "SASL_SSL"
    assert client["sasl.username"] == "me"
    assert client["sasl.password"] == PASSWORD
    assert client["log_level"] == "3"
    assert loaded.database.url.get_secret_value() == "postgresql://db/stock"
    assert loaded.database.settings == {"work_mem": "64MB"}
    assert loaded.batch.max_messages == 7
    assert loaded.message.id == ("business:{a},{b}", "offset")
    assert loaded.message.scope_by_type
    assert loaded.handlers["OrderPlaced"].call == "other:place"


def test_a_deployment_may_live_in_the_environment_but_for_its_handlers(tmp_path: Path) -> None:
    environ = {
        "PROCESSOR_CONSUMER": "inventory",
        "PROCESSOR_TOPIC": "orders",
        "PROCESSOR_KAFKA__BOOTSTRAP_SERVERS": "broker:9092",
        "PROCESSOR_DATABASE__URL": "postgresql://db/stock",
    }
    assert settings(tmp_path, '[handlers]\n"*" = "a:b"', environ).topics == ("orders",)


def test_secrets_come_from_files_too(tmp_path: Path) -> None:
    (tmp_path / "url").write_text("postgresql://db/stock\n")
    (tmp_path / "password").write_text("from-a-file\n")
    text = toml(
        database="url_file = 'url'",
        tables="[kafka.client]\nsasl.password_file = 'password'",
    )
    loaded = settings(tmp_path, text, {"PROCESSOR_DATABASE__PASSWORD_FILE": str(tmp_path / "password")})
    kwargs = loaded.database.connect_kwargs("inventory")
    assert kwargs["dsn"] == "postgresql://db/stock"
    assert kwargs["password"] == "from-a-file"
    assert loaded.kafka.admin_config()["sasl.password"] == "from-a-file"


def test_a_secret_file_in_the_environment_overrides_a_secret_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("from-a-file\n")
    environ = {"PROCESSOR_KAFKA__CLIENT__SASL_PASSWORD_FILE": str(tmp_path / "password")}
    loaded = settings(tmp_path, kafka(""), environ)
    assert loaded.kafka.admin_config()["sasl.password"] == "from-a-file"


def test_secrets_are_in_no_representation(tmp_path: Path) -> None:
    text = kafka("sasl.username = 'me'\nssl.key.password = 'key-secret'").replace(
        URL, f"{URL}\npassword = '{PASSWORD}'\ntls.sslpassword = 'tls-secret'"
    )
    loaded = settings(tmp_path, text)
    shown = "".join(
        [
            repr(loaded),
            str(loaded),
            loaded.model_dump_json(),
            json.dumps(loaded.describe()),
            repr(loaded.kafka),
        ]
    )
    for secret in (PASSWORD, "key-secret", "tls-secret"):
        assert secret not in shown
    assert loaded.describe()["database"]["url"] == "postgresql://inventory:***@localhost:5432/stock"
    assert loaded.describe()["kafka"]["client"]["sasl.password"] == "***"
    assert loaded.redact(f"password {PASSWORD} is wrong") == "password *** is wrong"


@pytest.mark.parametrize(
    ("url", "hidden"),
    [
        ("postgres://u:p@h:1/d", "postgres://u:***@h:1/d"),
        ("postgres://u:p@ss@h/d", "postgres://u:***@h/d"),
        ("postgres://u:p/s?s@h/d", "postgres://u:***@h/d"),
        (
            "postgres://h/d?user=u&password=p&sslmode=require",
            "postgres://h/d?user=u&password=***&sslmode=require",
        ),
        ("postgres://u@h/d", "postgres://u@h/d"),
    ],
)
def test_a_password_is_hidden_wherever_a_url_may_hold_it(url: str, hidden: str) -> None:
    assert hide_password(url) == hidden


def test_the_consumer_gets_what_exactly_once_needs(tmp_path: Path) -> None:
    text = toml(tables="[kafka.client]\nlinger.ms = 3\n[kafka.consumer]\nqueued.max.messages.kbytes = 99")
    config = settings(tmp_path, text).kafka.consumer_config("inventory")
    assert config == {
        "bootstrap.servers": "localhost:9092",
        "client.id": "inventory",
        "group.id": "inventory",
        "group.protocol": "classic",
        "partition.assignment.strategy": "cooperative-sticky",
        "session.timeout.ms": 10_000,
        "heartbeat.interval.ms": 250,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "isolation.level": "read_committed",
        "auto.offset.reset": "error",
        "queued.max.messages.kbytes": 99,
        "fetch.queue.backoff.ms": 50,
        "fetch.wait.max.ms": 100,
    }


def test_with_the_new_group_protocol_the_broker_decides(tmp_path: Path) -> None:
    config = settings(tmp_path, toml(kafka=f'{KAFKA}\ngroup_protocol = "consumer"')).kafka.consumer_config("a")
    assert config["group.protocol"] == "consumer"
    assert not {"session.timeout.ms", "partition.assignment.strategy"} & config.keys()


def test_the_producer_gets_what_exactly_once_needs(tmp_path: Path) -> None:
    text = toml(
        tables="[kafka.client]\nclient.rack = 'r'\nfetch.min.bytes = 2\nretries = 9\n"
        "[kafka.producer]\nqueue.buffering.max.ms = 4\nmessage.send.max.retries = 8\nacks = 'all'"
    )
    config = settings(tmp_path, text).kafka.producer_config("inventory-0")
    assert config == {
        "bootstrap.servers": "localhost:9092",
        "client.id": "inventory-0",
        "client.rack": "r",
        "transactional.id": "inventory-0",
        "transaction.timeout.ms": 15_000,
        "enable.idempotence": True,
        "acks": "all",
        "metadata.recovery.strategy": "none",
        "queue.buffering.max.ms": 4,
        "message.send.max.retries": 8,
        "delivery.report.only.error": True,
        "retry.backoff.ms": 2,
        "compression.type": "lz4",
    }


@pytest.mark.parametrize("protocol", ["classic", "consumer"])
def test_librdkafka_takes_what_we_give_it(protocol: str) -> None:
    kafka = KafkaSettings.model_validate({"bootstrap_servers": "localhost:1", "group_protocol": protocol})
    assert properties.misfit("consumer", kafka.consumer_config("a")) is None
    assert properties.misfit("producer", kafka.producer_config("a-0")) is None


@pytest.mark.parametrize(
    ("role", "config", "says"),
    [
        ("producer", {"transactional.id": "a", "message.timeout.ms": 90_000}, "message.timeout.ms"),
        (
            "consumer",
            {"group.id": "a", "security.protocol": "SASL_SSL", "ssl.ca.location": "/no"},
            "ssl.ca.location",
        ),
    ],
)
def test_settings_that_clash_are_found_offline(role: str, config: dict[str, object], says: str) -> None:
    assert says in str(properties.misfit(role, config))  # type: ignore[arg-type]


def test_asyncpg_gets_timeouts_tls_and_server_settings(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    text = toml(
        database=f"url = 'postgresql://db/stock?application_name=mine'\ntls.sslmode = 'verify-full'\n"
        f"tls.sslrootcert = '{tmp_path}/ca.pem'\ncommand_timeout_ms = 1500\n"
        "settings.statement_timeout = 20000"
    )
    kwargs = settings(tmp_path, text).database.connect_kwargs("inventory")
    assert kwargs["dsn"].startswith("postgresql://db/stock?application_name=mine&sslmode=verify-full&sslrootcert=")
    assert kwargs["timeout"] == 10.0
    assert kwargs["command_timeout"] == 1.5
    assert kwargs["server_settings"] == {
        "idle_in_transaction_session_timeout": "30000",
        "default_transaction_isolation": "read committed",
        "statement_timeout": "20000",
    }
    plain = settings(tmp_path).database.connect_kwargs("inventory")
    assert plain["server_settings"]["application_name"] == "processor:inventory"


def test_a_server_that_takes_writes_is_asked_for_and_each_host_is_tried_by_itself(tmp_path: Path) -> None:
    text = toml(database="url = 'postgresql://u:p@[::1]:5,b/stock?application_name=mine'")
    kwargs = settings(tmp_path, text).database.connect_kwargs("inventory")
    assert kwargs["target_session_attrs"] == "read-write"
    assert one_by_one(kwargs["dsn"]) == {
        "[::1]:5": "postgresql://u:p@[::1]:5/stock?application_name=mine",
        "b": "postgresql://u:p@b/stock?application_name=mine",
    }
    text = toml(database="url = 'postgresql:///stock?host=/tmp&target_session_attrs=primary'")
    kwargs = settings(tmp_path, text).database.connect_kwargs("inventory")
    assert kwargs["target_session_attrs"] == "primary"
    assert list(one_by_one(kwargs["dsn"]).values()) == [kwargs["dsn"]]


def test_migrations_are_looked_for_in_the_working_directory_and_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = tmp_path / "config" / "sql"
    here = tmp_path / "work" / "sql"
    beside.mkdir(parents=True)
    here.parent.mkdir()
    monkeypatch.chdir(here.parent)
    text = toml(database=f"{URL}\nmigrations = ['sql']")
    assert settings(beside.parent, text).database.migrations == (beside,)
    here.mkdir()
    assert settings(beside.parent, text).database.migrations == (Path("sql"),)


def test_property_names_are_those_of_the_librdkafka_at_hand(tmp_path: Path) -> None:
    shown = properties_of_librdkafka(tmp_path)
    assert shown.keys() >= librdkafka.NAMES
    for table, scope in ((librdkafka.CONSUMER, "C"), (librdkafka.PRODUCER, "P"), (librdkafka.BOTH, "*")):
        assert {shown[name] for name in table} == {scope}


def properties_of_librdkafka(tmp_path: Path) -> dict[str, str]:
    """Names and C/P/* scopes, from the table librdkafka prints for its own documentation."""
    file = tmp_path / "properties"
    library, libc = ctypes.CDLL(cimpl.__file__), ctypes.CDLL(None)
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(os.fsencode(file), b"w"))
    library.rd_kafka_conf_properties_show(stream)
    libc.fclose(stream)
    rows = [line.split("|") for line in file.read_text().splitlines() if line.count("|") >= 5]
    return {row[0].strip(): row[1].strip() for row in rows}


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads where Linux shows them")
def test_asking_librdkafka_about_a_property_makes_no_client() -> None:
    threads = len(list(Path("/proc/self/task").iterdir()))
    assert properties.refusal("socket.timeout.ms", 5000) is None
    assert len(list(Path("/proc/self/task").iterdir())) == threads


def test_example_deployments_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[2]
    monkeypatch.chdir(root)
    examples = sorted(Path("config").glob("*.toml"))
    assert [load(example, {}).consumer for example in examples] == ["billing", "inventory", "payments"]


TOP = 'consumer = "inventory"\ntopic = "orders"\n'


def test_a_profile_stands_for_values_of_batch_and_each_can_still_be_set(tmp_path: Path) -> None:
    def batch(top: str = "", table: str = "", **environ: str) -> tuple[int, int]:
        loaded = settings(tmp_path, toml(top=TOP + top, batch=table), environ).batch
        return loaded.max_messages, loaded.linger_ms

    assert batch() == batch('profile = "balanced"') == (1000, 20)
    assert batch('profile = "latency"') == (200, 0)
    assert batch('profile = "throughput"') == batch(PROCESSOR_PROFILE="throughput") == (4000, 200)
    assert batch('profile = "latency"', PROCESSOR_PROFILE="throughput") == (4000, 200)
    assert batch('profile = "throughput"', "max_messages = 7") == (7, 200)
    assert batch('profile = "throughput"', PROCESSOR_BATCH__MAX_MESSAGES="7") == (7, 200)
    assert batch('profile = "throughput"', "max_messages = 8", PROCESSOR_BATCH__LINGER_MS="3") == (8, 3)


def test_concurrency_is_one_unless_said_otherwise(tmp_path: Path) -> None:
    assert settings(tmp_path).concurrency == 1
    assert settings(tmp_path, toml(top=TOP + "concurrency = 64")).concurrency == 64
    assert settings(tmp_path, toml(), {"PROCESSOR_CONCURRENCY": "8"}).concurrency == 8


def test_failed_messages_are_tried_again_and_then_put_aside_unless_said_otherwise(tmp_path: Path) -> None:
    loaded = settings(tmp_path)
    assert loaded.retry == RetrySettings(attempts=5, first_delay_ms=200, max_delay_ms=60_000)
    assert loaded.failure.policy == "dead-letter"
    assert loaded.failure.classes == {}
    assert loaded.run.ready_file is None
    handler = loaded.handlers["OrderPlaced"]
    assert (handler.effect, handler.timeout_ms, handler.retry) == (False, None, None)


def test_a_type_may_have_a_retry_table_of_its_own(tmp_path: Path) -> None:
    own = 'Charge = { call = "a:b", effect = true, timeout_ms = 9, retry = { attempts = 2, first_delay_ms = 5 } }'
    loaded = settings(tmp_path, toml(handlers=f'Other = "a:c"\n{own}') + "\n[retry]\nattempts = 7")
    charge = loaded.handlers["Charge"]
    assert charge.retry == RetrySettings(attempts=2, first_delay_ms=5)
    assert (charge.effect, charge.timeout_ms) == (True, 9)
    assert loaded.handlers["Other"].retry is None
    assert loaded.retry.attempts == 7


def test_dead_letter_topics_are_named_after_topic_and_consumer(tmp_path: Path) -> None:
    def topic_for(pattern: str | None) -> str | None:
        table = "" if pattern is None else f'[failure]\ndead_letter_topic = "{pattern}"'
        return settings(tmp_path, failing(table)).dead_letter_topic("orders")

    assert topic_for(None) == "orders.inventory.dlq"
    assert topic_for("dead-{consumer}") == "dead-inventory"
    assert topic_for("failed") == "failed"
    assert topic_for("") is None


def test_classes_come_from_the_environment_too_and_sqlstates_get_their_capitals_back(tmp_path: Path) -> None:
    table = '[failure.classes]\n"httpx:ConnectError" = "outage"\n"23" = "poison"'
    loaded = settings(tmp_path, failing(table), {"PROCESSOR_FAILURE__CLASSES__40P01": "bug"})
    assert loaded.failure.classes == {"httpx:ConnectError": "outage", "23": "poison", "40P01": "bug"}
