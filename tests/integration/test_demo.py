"""`make demo` as a person runs it, only smaller: on a stack of its own, from the command line."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from processor.stack import Stack

ROOT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "stack"
    Stack(tmp_path / "stack").down(purge=True)


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "demo", "--directory", str(folder), *arguments],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def left_over(folder: Path) -> list[str]:
    """Servers of this stack, and whatever else was told its folder."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        command = " ".join(process.info["cmdline"] or ())
        if str(folder) in command and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(command)
    return found


def test_kills_lose_and_double_nothing(folder: Path) -> None:
    demo = start(folder, "--orders", "3000", "--json")
    out, err = demo.communicate(timeout=240)
    assert demo.returncode == 0, err
    summary = json.loads(out)
    assert summary["ok"] is True
    assert (summary["lost"], summary["doubled"], summary["wrong"]) == (0, 0, [])
    assert summary["orders"] == summary["outputs"] == 3000
    assert summary["reserved"] + summary["rejected"] == 3000
    assert summary["rows"] == summary["reserved"]
    assert summary["records"] == 3000 + summary["duplicates"]
    assert summary["duplicates"] > 0
    between, random = summary["kills"]
    assert between["where"] == "between the two commits"
    assert between["unsent"] > 0, "the kill left nothing for recovery to do"
    assert between["resent"] == between["unsent"]
    assert random["where"] == "at a random moment"
    assert left_over(folder) == []


def test_ctrl_c_in_the_middle_puts_everything_away(folder: Path) -> None:
    demo = start(folder, "--orders", "50000")
    assert demo.stdout is not None
    for line in demo.stdout:
        if "records fed" in line:
            break
    (child,) = (c for c in psutil.Process(demo.pid).children() if "run" in c.cmdline())
    demo.send_signal(signal.SIGINT)
    child.wait(60)  # it has begun to put things away
    demo.send_signal(signal.SIGINT)  # an impatient person
    _, err = demo.communicate(timeout=60)
    assert demo.returncode == 130, err
    assert err.splitlines()[-1] == "interrupted: everything is cleaned up"
    assert not child.is_running()
    assert left_over(folder) == []
