"""What the command `processor dlq` decides before it asks any server."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.command import processor

CONFIG = """
consumer = "shop"
topic = "orders"
[handlers]
OrderPlaced = "shop:reserve"
[kafka]
bootstrap_servers = "127.0.0.1:1"
[database]
url = "postgresql://nobody@127.0.0.1:1/none"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "orders.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["redrive", "orders.toml"], "--all"),
        (["discard", "orders.toml", "--reason", "old", "--yes"], "--all"),
        (["redrive", "orders.toml", "--all", "--key", "k"], "leave it out"),
        (["discard", "orders.toml", "--reason", "old", "--key", "k"], "--yes"),
        (["discard", "orders.toml", "--reason", " ", "--key", "k", "--yes"], "say why"),
        (["list", "orders.toml", "--status", "completed"], "valid: failed, parked"),
        (["list", "orders.toml", "--since", "soon"], "'soon' is no time"),
        (["list", "orders.toml", "--key", "k", "--key-hex", "00"], "not both"),
        (["list", "orders.toml", "--key-hex", "0x0"], "not hexadecimal"),
        (["list", "orders.toml", "--json", "-o", "jsonl"], "exclude each other"),
        (["redrive", "orders.toml", "--all", "--despite-collision"], "give their --id"),
        (["show", "orders.toml"], "one message id"),
        (["show", "orders.toml", "a", "b"], "one message id"),
    ],
)
def test_wrong_use_is_one_line_and_exit_2(project: Path, arguments: list[str], says: str) -> None:
    done = processor(project, "dlq", *arguments)
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert says in line
    assert done.stdout == ""


@pytest.mark.parametrize(
    "arguments",
    [["list"], ["redrive", "--all"], ["redrive", "--all", "--dry-run"], ["discard", "--all", "--reason", "x", "--yes"]],
)
def test_unreachable_database_is_one_line_and_exit_1(project: Path, arguments: list[str]) -> None:
    done = processor(project, "dlq", arguments[0], "orders.toml", *arguments[1:])
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: orders.toml: database.url: cannot connect to ")


def test_show_takes_the_configuration_from_the_environment(project: Path) -> None:
    done = processor(project, "dlq", "show", "m1", environ={"PROCESSOR_CONFIG": "orders.toml"})
    assert done.returncode == 1
    assert "database.url" in done.stderr
