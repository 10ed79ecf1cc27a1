"""README's first service, followed as a new user does: its files, then its commands from top to bottom."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from processor.stack import Stack
from processor.stack.guard import Guard

README = (Path(__file__).parents[2] / "README.md").read_text()
SECTION = README[README.index("## A first service") : README.index("## What is guaranteed")]
FILES = re.findall(r"`([\w/]+\.(?:py|sql|toml))`[^`\n]*:\n\n```(?:python|sql|toml)\n(.*?)```", SECTION, re.DOTALL)
# The first one installs the project, which has been done where this runs.
COMMANDS = "".join(re.findall(r"```sh\n(.*?)```", SECTION, re.DOTALL)[1:])
SHOWN = re.findall(r"```\n(\{.*?)```", SECTION, re.DOTALL)[0]
SECONDS = 240


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Path]:
    """The folder of the service; its servers are gone afterwards, also if this process is killed."""
    guard = Guard(tmp_path / ".stack")
    yield tmp_path
    Stack(tmp_path / ".stack").down(purge=True)
    guard.dismiss()


def follow(folder: Path) -> tuple[int, str, str]:
    """Run all commands in one shell; the service that they start in the background ends with it."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PROCESSOR_", "PYTHONPATH"))}
    environ |= {name: os.environ[name] for name in ("PROCESSOR_STACK_CACHE",) if name in os.environ}
    environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environ['PATH']}"
    shell = subprocess.Popen(
        ["bash", "-ec", COMMANDS],
        cwd=folder,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = shell.communicate(timeout=SECONDS)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    return shell.returncode, out, err


def test_the_first_service_answers_an_order_and_not_its_repeat(shop: Path) -> None:
    assert len(FILES) == 6
    for name, text in FILES:
        (shop / name).parent.mkdir(exist_ok=True)
        (shop / name).write_text(text)
    code, out, err = follow(shop)
    log = (shop / "run.log").read_text() if (shop / "run.log").exists() else ""
    assert code == 0, f"{out}\n{err}\n{log}"
    assert '"event":"stopped"' in log.splitlines()[-1]
    invoices = [line for line in out.splitlines(keepends=True) if line.startswith("{")]
    assert "".join(invoices) == SHOWN, f"{out}\n{log}"
    assert out.endswith("its data and logs are deleted\n")
