"""What is wrong with a configuration is one line each, and shows no secret."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from processor.errors import ConfigError
from processor.kafka import properties
from processor.settings.load import load
from tests.support.command import processor
from tests.support.configuration import KAFKA, PASSWORD, URL, failing, kafka, settings, toml


@dataclass(frozen=True)
class Bad:
    """A configuration with one mistake, and what its one line of error must say."""

    key: str
    says: str
    text: str = ""
    environ: dict[str, str] = field(default_factory=dict)


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
    "illegal topic": Bad("topic", "not a topic name", toml(top='consumer = "a"\ntopic = "^orders.*"')),
    "illegal consumer": Bad("consumer", "1 to 100", toml(top='consumer = "a b"\ntopic = "a"')),
    "no handler": Bad("handlers", "names no handler", toml(handlers="")),
    "handler without function": Bad("handlers.A.call", "module:function", toml(handlers='A = "handlers.a"')),
    "dotted type unquoted": Bad("handlers.order", "in quotes", toml(handlers='order.placed = "a:b"')),
    "text instead of a number": Bad("batch.linger_ms", "integer", toml(batch='linger_ms = "soon"')),
    "unknown profile": Bad("profile", "throughput", toml(top='consumer = "a"\ntopic = "a"\nprofile = "fast"')),
    "profile that is not a name": Bad(
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
    "bad pointer": Bad("message.id", "not a JSON pointer", toml(message='id = ["payload:event_id"]')),
    "template without field": Bad("message.id", "names no field", toml(message='id = ["business:order"]')),
    "template with open brace": Bad("message.id", "unbalanced", toml(message='id = ["business:{order"]')),
    "template with doubled braces": Bad("message.id", "unbalanced", toml(message='id = ["business:{{a}}:{order_id}"]')),
    "template with index": Bad("message.id", "not a plain name", toml(message='id = ["business:{0}"]')),
    "strategy that is never reached": Bad("message.id", "never used", toml(message='id = ["offset", "header:id"]')),
    # what becomes of failures
    "unknown class": Bad(
        "failure.classes.23505", "did you mean poison?", failing('[failure.classes]\n"23505" = "posion"')
    ),
    "too long for a SQLSTATE": Bad("failure.classes", "SQLSTATE", failing('[failure.classes]\n"235055" = "poison"')),
    "too short for a SQLSTATE": Bad("failure.classes", "SQLSTATE", failing('[failure.classes]\n"2" = "poison"')),
    "exception without its module": Bad(
        "failure.classes", "module:Exception", failing('[failure.classes]\n"ConnectError" = "outage"')
    ),
    "unknown policy": Bad("failure.policy", "did you mean park-key?", failing('[failure]\npolicy = "park"')),
    "dead-letter topic with another placeholder": Bad(
        "failure.dead_letter_topic", "{topic} and {consumer}", failing('[failure]\ndead_letter_topic = "{group}.dlq"')
    ),
    "dead-letter topic with a blank": Bad(
        "failure.dead_letter_topic", "topic name", failing('[failure]\ndead_letter_topic = "dead letters"')
    ),
    "dead letters into the input topic": Bad(
        "failure.dead_letter_topic", "come in and fail again", failing('[failure]\ndead_letter_topic = "{topic}"')
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
    "not a Postgres URL": Bad("database.url", "postgresql://", toml(database=f"url = 'mysql://a:{PASSWORD}@h/b'")),
    "not a URL": Bad("database.url", "postgresql://", toml(database=f"url = 'a:{PASSWORD}@h/b'")),
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
    # retention
    "days and hours": Bad("retention.hours", "give one of them", failing("[retention]\ndays = 1\nhours = 5")),
    "negative retention": Bad("retention.days", "greater than or equal to 0", failing("[retention]\ndays = -1")),
    "no hours": Bad("retention.hours", "greater than or equal to 1", failing("[retention]\nhours = 0")),
    "no pace": Bad("retention.pace", "greater than or equal to 1", failing("[retention]\npace = 0")),
    "archive missing": Bad("retention.archive", "no such directory", failing("[retention]\narchive = 'nowhere'")),
    "retention shorter than a window": Bad(
        "retention.hours",
        "shorter than message.window_seconds (7200)",
        toml(message="window_seconds = 7200") + "\n[retention]\nhours = 1",
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
    "file for a property that is not secret": Bad(
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
def test_the_command_prints_one_line_and_exits_with_2(name: str, tmp_path: Path) -> None:
    bad = BAD[name]
    (tmp_path / "orders.toml").write_text(bad.text or toml())
    done = processor(tmp_path, "check", "orders.toml", environ=bad.environ)
    assert_one_line(done, bad.key)


@pytest.mark.parametrize("command", ["run", "migrate"])
def test_every_command_refuses_a_bad_configuration_alike(command: str, tmp_path: Path) -> None:
    bad = BAD["acks below all"]
    (tmp_path / "orders.toml").write_text(bad.text)
    environ = {"PROCESSOR_CONFIG": "orders.toml", "PROCESSOR_LOG_FORMAT": "console"}
    assert_one_line(processor(tmp_path, command, environ=environ), bad.key)


def assert_one_line(done: subprocess.CompletedProcess[str], key: str) -> None:
    assert done.returncode == 2
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"error: orders.toml: {key}: ")
    assert PASSWORD not in line


def test_several_problems_are_one_line_each_and_unknown_keys_come_first(tmp_path: Path) -> None:
    text = toml(top='consumer = "a b"\ntopic = "orders"', batch="max_mesages = 1") + "\n[run]\nstop_timeout_ms = 0"
    with pytest.raises(ConfigError) as caught:
        settings(tmp_path, text)
    keys = [line.split(": ")[1] for line in str(caught.value).splitlines()]
    assert keys == ["batch.max_mesages", "consumer", "run.stop_timeout_ms"]
