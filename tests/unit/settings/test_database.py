"""What asyncpg is given."""

from __future__ import annotations

from pathlib import Path

from processor.settings.database import one_by_one
from tests.support.configuration import settings, toml


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
