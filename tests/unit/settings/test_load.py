"""A file, the environment above it, and secrets from files."""

from __future__ import annotations

from pathlib import Path

import pytest

from processor.errors import ConfigError
from processor.settings.load import load
from tests.support.configuration import PASSWORD, URL, failing, kafka, settings, toml


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


def test_a_misspelt_file_name_suggests_the_nearest_one(tmp_path: Path) -> None:
    (tmp_path / "orders.toml").write_text(toml())
    with pytest.raises(ConfigError, match=r"did you mean .*orders\.toml\?"):
        load(tmp_path / "order.toml", {})


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


def test_classes_come_from_the_environment_too_and_sqlstates_get_their_capitals_back(tmp_path: Path) -> None:
    table = '[failure.classes]\n"httpx:ConnectError" = "outage"\n"23" = "poison"'
    loaded = settings(tmp_path, failing(table), {"PROCESSOR_FAILURE__CLASSES__40P01": "bug"})
    assert loaded.failure.classes == {"httpx:ConnectError": "outage", "23": "poison", "40P01": "bug"}
