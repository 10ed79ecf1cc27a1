"""What the command `processor dlq` decides before it asks any server."""

from __future__ import annotations

import base64
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from processor.cli import dlq
from processor.kafka import properties
from processor.operations import dead_letters
from processor.operations.dead_letters import Filter, WrongUse
from processor.settings.load import load
from tests.support.command import processor

NOW = datetime(2025, 3, 1, 12, tzinfo=UTC)

CONFIG = """
consumer = "shop"
topic = "orders"
[handlers]
OrderPlaced = "shop:reserve"
[kafka]
bootstrap_servers = "127.0.0.1:1"
[kafka.producer]
delivery.timeout.ms = 7000
[database]
url = "postgresql://nobody@127.0.0.1:1/none"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "orders.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2h", NOW - timedelta(hours=2)),
        ("1d12h", NOW - timedelta(days=1, hours=12)),
        ("90s", NOW - timedelta(seconds=90)),
        ("2025-02-28", datetime(2025, 2, 28, tzinfo=UTC)),
        ("2025-02-28T10:00", datetime(2025, 2, 28, 10, tzinfo=UTC)),
        ("2025-02-28T10:00Z", datetime(2025, 2, 28, 10, tzinfo=UTC)),
        ("2025-02-28T10:00+02:00", datetime(2025, 2, 28, 8, tzinfo=UTC)),
    ],
)
def test_times_are_moments_or_how_long_ago(text: str, expected: datetime) -> None:
    assert dead_letters.moment(text, NOW) == expected


@pytest.mark.parametrize("text", ["", "h", "2", "2x", "yesterday", "12h2d", "9999999999999d"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(WrongUse, match="2h"):
        dead_letters.moment(text, NOW)


def test_headers_come_back_byte_for_byte() -> None:
    stored = [["a", "ü\0"], ["a", {"base64": base64.b64encode(b"\xff\0").decode()}], ["b", None], ["a", ""]]
    assert dead_letters.headers_of(json.dumps(stored)) == [
        ("a", "ü\0".encode()),
        ("a", b"\xff\0"),
        ("b", None),
        ("a", b""),
    ]
    assert dead_letters.headers_of(None) == []


def test_producer_is_idempotent_without_transactions_and_keeps_what_was_configured(project: Path) -> None:
    config = dead_letters.producer_config(load(project / "orders.toml", environ={}).kafka, "shop")
    assert config["enable.idempotence"] is True
    assert config["acks"] == "all"
    assert not {"transactional.id", "transaction.timeout.ms", "delivery.report.only.error"} & config.keys()
    assert config["delivery.timeout.ms"] == 7000
    assert "message.timeout.ms" not in config
    assert properties.misfit("producer", config) is None


def test_chunks_are_bounded_by_rows_and_bytes_and_keep_the_order() -> None:
    half = dead_letters.CHUNK_BYTES // 2
    rows: Any = [{"n": n, "bytes": size} for n, size in enumerate([1, 1, 1, half, half, half, 3 * half, 1])]
    chunks = [[row["n"] for row in chunk] for chunk in dead_letters._chunks(rows, 2)]
    assert chunks == [[0, 1], [2, 3], [4, 5], [6], [7]]
    assert list(dead_letters._chunks([], 2)) == []


def test_a_status_alone_is_no_filter() -> None:
    assert not Filter(statuses=("failed",)).is_given()
    assert Filter(partition=0).is_given()
    assert Filter(key=b"").is_given()


def test_what_could_steer_a_terminal_is_shown_instead_of_obeyed() -> None:
    assert dlq._safe("a\x1b[31m\tb\n") == "a\\x1b[31m\tb\n"
    assert dlq._bytes_as_text(b"\x1b[31m") == (b"\x1b[31m".hex(), "hex")
    assert dlq._bytes_as_text("schön".encode()) == ("schön", "text")
    assert dlq._key_text(None) == "-"
    assert dlq._key_text(b"\xff") == "0xff"


def test_payload_is_shown_as_json_text_or_hex() -> None:
    assert dlq._pretty('{"a":1}', "text") == '{\n  "a": 1\n}'
    assert dlq._pretty("plain", "text") == "plain"
    assert dlq._pretty("00ff", "hex") == "00ff"
    assert dlq._pretty(None, None) == "null"


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
