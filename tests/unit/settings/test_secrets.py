"""No secret is shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from processor.settings.secrets import hide_password
from tests.support.configuration import PASSWORD, URL, kafka, settings


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
