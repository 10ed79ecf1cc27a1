from __future__ import annotations

import json
import os
import pty
from pathlib import Path

import pytest

from tests.support.command import processor

SECRETS = ("correct-horse-battery", "sasl-hunter2", "key-hunter2")
CONFIG = """
consumer = "inventory"
topic = "orders"
[handlers]
OrderPlaced = "shop:reserve"
[kafka]
bootstrap_servers = "127.0.0.1:1"
[kafka.client]
security.protocol = "SASL_PLAINTEXT"
sasl.mechanism = "PLAIN"
sasl.username = "inventory"
sasl.password = "sasl-hunter2"
ssl.key.password = "key-hunter2"
[database]
url = "postgresql://inventory:correct-horse-battery@127.0.0.1:1/stock"
"""
HANDLER = """
from typing import Any

from processor import Message


async def reserve(message: Message[dict[str, Any]], db: object) -> None: ...
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "orders.toml").write_text(CONFIG)
    (tmp_path / "shop.py").write_text(HANDLER)
    return tmp_path


def test_help_names_environment_and_exit_status(tmp_path: Path) -> None:
    for command in (
        [],
        *(["run"], ["check"], ["migrate"], ["status"], ["trace"], ["prune"], ["topic-recreated"], ["accept-rewind"]),
        *(["verify"], ["inbox", "list"], ["inbox", "show"]),
        *(["dlq", verb] for verb in ("list", "show", "redrive", "discard")),
    ):
        done = processor(tmp_path, *command, "--help")
        assert done.returncode == 0
        assert "PROCESSOR_CONFIG" in done.stdout
        assert "Exit status" in done.stdout


def test_version(tmp_path: Path) -> None:
    done = processor(tmp_path, "--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "processor")


@pytest.mark.parametrize("arguments", [["chek"], ["check"], ["check", "--conect", "orders.toml"]])
def test_wrong_usage_exits_with_2_and_no_traceback(tmp_path: Path, arguments: list[str]) -> None:
    done = processor(tmp_path, *arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_a_bad_log_level_is_a_configuration_error(project: Path) -> None:
    done = processor(project, "check", "orders.toml", environ={"PROCESSOR_LOG_LEVEL": "loud"})
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: PROCESSOR_LOG_LEVEL: must be one of debug, info")


def test_check_without_servers_is_fine_when_the_configuration_is(project: Path) -> None:
    done = processor(project, "check", environ={"PROCESSOR_CONFIG": "orders.toml"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    assert all(line.startswith("✓ ") for line in lines)
    assert "✓ handlers.OrderPlaced: shop:reserve" in lines


@pytest.mark.parametrize("workers", ["1", "2"])
def test_service_that_ends_says_why_in_a_last_line_of_json_where_logs_are_json(project: Path, workers: str) -> None:
    (project / "shop.py").write_text("")
    done = processor(project, "run", "orders.toml", "--workers", workers, environ={"PROCESSOR_LOG_LEVEL": "critical"})
    last = json.loads(done.stderr.splitlines()[-1])
    assert done.returncode == last["exit_code"] == 2
    assert (last["event"], last["level"]) == ("ended", "critical")
    assert last["reason"].startswith("orders.toml: handlers.OrderPlaced: shop:reserve: shop has no reserve")


def test_service_with_a_bad_configuration_says_so_in_one_line_of_json(project: Path) -> None:
    (project / "orders.toml").write_text(f"x = 1\ny = 2\n{CONFIG}")
    done = processor(project, "run", "orders.toml")
    (line,) = done.stderr.splitlines()
    ended = json.loads(line)
    assert done.returncode == ended["exit_code"] == 2
    assert [problem.split(": ")[1] for problem in ended["reason"].splitlines()] == ["x", "y"]


def test_service_whose_log_is_for_people_says_why_in_words(project: Path) -> None:
    (project / "shop.py").write_text("")
    done = processor(project, "run", "orders.toml", environ={"PROCESSOR_LOG_FORMAT": "console"})
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith("error: orders.toml: handlers.OrderPlaced: shop:reserve: shop has")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("", "shop has no reserve"),
        ("import nothing_of_that_name", "ModuleNotFoundError: No module named 'nothing_of_that_name'"),
        (HANDLER.replace("async ", ""), "async def"),
        (HANDLER.replace(", db: object", ""), "two parameters"),
        ("import os\nraise ValueError(os.environ['PROCESSOR_DATABASE__URL'])", "ValueError"),
    ],
)
def test_check_names_file_and_key_of_a_handler_that_will_not_do(project: Path, source: str, says: str) -> None:
    (project / "shop.py").write_text(source)
    url = f"postgresql://inventory:{SECRETS[0]}@127.0.0.1:1/stock"
    done = processor(project, "check", "orders.toml", environ={"PROCESSOR_DATABASE__URL": url})
    assert done.returncode == 2
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("✗ ")]
    assert line.startswith("✗ orders.toml: handlers.OrderPlaced: ")
    assert says in line
    assert SECRETS[0] not in done.stdout + done.stderr


def test_check_finds_a_certificate_that_cannot_be_read(project: Path) -> None:
    text = CONFIG.replace("SASL_PLAINTEXT", "SASL_SSL").replace("sasl.mech", "ssl.ca.location = 'no.pem'\nsasl.mech")
    (project / "orders.toml").write_text(text)
    done = processor(project, "check", "orders.toml")
    assert done.returncode == 2
    assert "✗ orders.toml: kafka.consumer: librdkafka refuses it: Failed" in done.stdout
    assert "ssl.ca.location" in done.stdout


def test_check_with_unreachable_servers_names_them_and_exits_with_1(project: Path) -> None:
    done = processor(project, "check", "orders.toml", "--connect")
    assert done.returncode == 1
    failed = [line for line in done.stdout.splitlines() if line.startswith("✗ ")]
    assert [line.split(": ")[1] for line in failed] == ["kafka.bootstrap_servers", "database.url"]
    assert "127.0.0.1:1" in failed[0]
    assert "postgresql://inventory:***@127.0.0.1:1/stock" in failed[1]


def test_check_as_json_shows_the_settings_without_secrets(project: Path) -> None:
    shown = json.loads(processor(project, "check", "orders.toml", "--json").stdout)
    assert shown["ok"]
    assert {"kind": "configuration", "name": "handlers.OrderPlaced", "ok": True, "text": "shop:reserve"} in shown[
        "checks"
    ]
    assert shown["settings"]["kafka"]["client"]["sasl.password"] == "***"


def test_check_as_lines_of_json_gives_one_finding_per_line(project: Path) -> None:
    done = processor(project, "check", "orders.toml", "-o", "jsonl")
    findings = [json.loads(line) for line in done.stdout.splitlines()]
    assert {"kind": "configuration", "name": "handlers.OrderPlaced", "ok": True, "text": "shop:reserve"} in findings
    (project / "orders.toml").write_text("x = 1\n" + CONFIG)
    done = processor(project, "check", "orders.toml", "-o", "jsonl")
    (finding,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (done.returncode, finding["ok"], finding["text"].split(": ")[1]) == (2, False, "x")


def test_check_as_json_stays_json_when_the_configuration_is_bad(project: Path) -> None:
    (project / "orders.toml").write_text("x = 1\n" + CONFIG)
    done = processor(project, "check", "orders.toml", "--json")
    assert done.returncode == 2
    shown = json.loads(done.stdout)
    assert not shown["ok"]
    assert [check["text"].split(": ")[1] for check in shown["checks"]] == ["x"]


@pytest.mark.parametrize(
    ("arguments", "before", "after"),
    [
        (["check"], "", ""),
        (["check", "--json"], "", ""),
        (["check", "--connect"], "", ""),
        (["check", "--connect"], "PLAIN", "NONE"),
        (["migrate"], "", ""),
        (["check"], "127.0.0.1:1/", "127.0.0.1:port/"),
        (["check"], "postgresql://", "postgrsql://"),
        (["check"], "sasl.password", "sasl.pasword"),
        (["check"], "ssl.key.password", "ssl.key.pasword"),
        (["check"], "[database]", "[databse]"),
        (["check"], '"sasl-hunter2"', '["sasl-hunter2"]'),
        (["check"], '"sasl-hunter2"', '"sasl-hunter2'),
        (["check"], 'url = "', "url = 1 # "),
    ],
)
def test_secrets_are_in_no_output(project: Path, arguments: list[str], before: str, after: str) -> None:
    (project / "orders.toml").write_text(CONFIG.replace(before, after) if before else CONFIG)
    done = processor(project, *arguments, "orders.toml", environ={"PROCESSOR_LOG_LEVEL": "debug"})
    for secret in SECRETS:
        assert secret not in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_on_a_terminal_findings_are_coloured(project: Path) -> None:
    reader, writer = pty.openpty()
    try:
        processor(project, "check", "orders.toml", environ={"TERM": "xterm-256color"}, stdout=writer)
    finally:
        os.close(writer)
    shown = os.read(reader, 65_536).decode()
    os.close(reader)
    assert "\x1b[32m✓\x1b[0m" in shown


def test_a_terminal_that_knows_only_ascii_gets_no_traceback(project: Path) -> None:
    done = processor(project, "check", "orders.toml", environ={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_that_went_away_is_no_news(project: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = processor(project, "check", "orders.toml", stdout=writer)
    finally:
        os.close(writer)
    assert done.stderr == ""
