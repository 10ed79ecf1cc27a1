from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from processor.errors import ConfigError
from processor.observe import logs

SCRIPT = """
import asyncio, logging, warnings
from pydantic import SecretStr
from processor.observe import logs
logs.configure()
log = logs.get_logger(consumer="inventory")
log.debug("not_shown")
log.info("batch_committed", records=500, lag={"orders": {0: 3}})
log.warning(
    "odd_values", raw=b"\\xff\\x00ab", names={"b", "a"}, big=2**70, error=ValueError("no"), half="\\ud800",
    secret=SecretStr("hunter2"), nested={"deep": [SecretStr("hunter2")]},
)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("handler_failed")
logging.getLogger("somewhere").warning("from %s", "stdlib")
logging.getLogger("asyncio").error("Task was destroyed")
warnings.warn("old thing", stacklevel=1)
"""


def run(environ: dict[str, str] | None = None, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=inherited | (environ or {}),
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=60,
        check=True,
    )


def test_without_a_terminal_each_event_is_one_json_object_on_stderr() -> None:
    done = run()
    assert done.stdout == ""
    events = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(event["level"], event["event"]) for event in events[:3]] == [
        ("info", "batch_committed"),
        ("warning", "odd_values"),
        ("error", "handler_failed"),
    ]
    first, odd, failed, stdlib, loop, warning = events
    assert list(first) == ["timestamp", "level", "event", "consumer", "records", "lag"]
    assert first["timestamp"].endswith("Z")
    assert first["records"] == 500
    assert first["lag"] == {"orders": {"0": 3}}
    assert odd["error"] == "no"
    assert "ZeroDivisionError" in failed["exception"]
    assert (stdlib["event"], stdlib["logger"], stdlib["level"]) == ("from stdlib", "somewhere", "warning")
    assert loop["logger"] == "asyncio"
    assert "old thing" in warning["event"]


def test_each_line_of_a_worker_has_its_number_whoever_writes_it() -> None:
    events = [json.loads(line) for line in run({"PROCESSOR_WORKER": "3"}).stderr.splitlines()]
    assert {event.get("logger") for event in events} >= {None, "somewhere", "asyncio", "py.warnings"}
    assert [int(event["worker"]) for event in events] == [3] * len(events)
    assert "worker" not in run().stderr


def test_a_secret_is_never_logged() -> None:
    done = run({"PROCESSOR_LOG_LEVEL": "debug"})
    assert "not_shown" in done.stderr
    assert "hunter2" not in done.stderr
    assert "***" in done.stderr


def test_on_a_terminal_events_are_for_people() -> None:
    reader, writer = pty.openpty()
    try:
        run(stderr=writer)
    finally:
        os.close(writer)
    shown = os.read(reader, 65_536).decode()
    os.close(reader)
    assert "batch_committed" in shown
    assert "\x1b[" in shown
    assert not shown.startswith("{")
    assert "hunter2" not in shown


@pytest.mark.parametrize(("form", "is_json"), [("json", True), ("console", False), ("auto", True)])
def test_the_form_can_be_chosen(form: str, is_json: bool) -> None:
    first = run({"PROCESSOR_LOG_FORMAT": form}).stderr.splitlines()[0]
    assert first.startswith("{") is is_json


@pytest.mark.parametrize("variable", ["PROCESSOR_LOG_FORMAT", "PROCESSOR_LOG_LEVEL"])
def test_an_unknown_choice_is_a_configuration_error(variable: str) -> None:
    with pytest.raises(ConfigError, match=rf"{variable}: must be one of"):
        logs.configure({variable: "verbose"})


def test_importing_has_no_effect_on_logging(tmp_path: Path) -> None:
    code = "import logging, processor.observe.logs; assert not logging.getLogger().handlers"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=tmp_path, timeout=60)
