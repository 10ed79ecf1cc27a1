"""A runbook of docs/operations.md, followed by a test: the commands are taken from the page, in their order.

The page speaks of the README's service. Its names stand for those of the test's own deployment.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from processor.stack import Stack, kafka
from processor.stack.display import Display
from processor.stack.java import Runtime
from tests.conftest import Start
from tests.support.deployments import PROJECT, Deployment
from tests.support.processes import Process

PAGE = PROJECT / "docs" / "operations.md"
CONFIG = "shop.toml"
SERVICE = re.compile(rf"(?P<variables>(?:\w+=\S+ )*)processor run {re.escape(CONFIG)}(?P<arguments>.*)\n")
SECONDS = 90


def sections() -> dict[str, str]:
    """The text of each runbook, by its heading."""
    runbooks = PAGE.read_text().partition("\n## Runbooks\n")[2].partition("\n## ")[0]
    return dict(re.findall(r"^### (.+)\n((?:(?!^### ).*\n?)*)", runbooks, re.MULTILINE))


def test_name(heading: str) -> str:
    return "test_" + re.sub(r"[^a-z0-9]+", "_", heading.lower()).strip("_")


def blocks(section: str) -> list[str]:
    return re.findall(r"^```sh\n(.*?)^```", section, re.MULTILINE | re.DOTALL)


@dataclass
class Runbook:
    """Its commands, one block after the other; a block that starts the service is for `service`."""

    deployed: Deployment
    folder: Path
    start: Start
    left: list[str]
    environ: dict[str, str] = field(default_factory=dict)

    def run(self, code: int = 0) -> str:
        """Follow the next block in one shell, which ends at the first command that fails; what was printed."""
        return self.again(self.left.pop(0), code)

    def again(self, block: str, code: int = 0) -> str:
        assert SERVICE.fullmatch(block) is None, f"the next step is: {block}"
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
        done = subprocess.run(
            ["bash", "-euc", block],
            cwd=self.folder,
            env=inherited | self.environ | self.deployed.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert done.returncode == code, f"exit code {done.returncode}, not {code}, of\n{block}\n{done.stdout}"
        return done.stdout

    def service(self) -> Process:
        """Start `processor run` as the next block says."""
        block = self.left.pop(0)
        found = SERVICE.fullmatch(block)
        assert found is not None, f"the next step is: {block}"
        variables = dict(one.split("=", 1) for one in found["variables"].split())
        return self.start(self.deployed, *shlex.split(found["arguments"], comments=True), **variables)


@contextmanager
def followed(heading: str, deployed: Deployment, stack: Stack, folder: Path, start: Start) -> Iterator[Runbook]:
    """The page at this runbook, in a folder with the deployment's file and with Kafka's tools on the path.

    At the end nothing of it may be left.
    """
    config = folder / CONFIG
    deployed.config.rename(config)
    names = {"orders": deployed.input_topic, "invoices": deployed.output_topic, "invoicing": deployed.consumer}
    section = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], sections()[heading])
    tools = folder / "tools"
    _put_tools(tools, stack)
    book = Runbook(
        replace(deployed, config=config),
        folder,
        start,
        blocks(section),
        {
            "PATH": os.pathsep.join((str(tools), str(Path(sys.executable).parent), os.environ["PATH"])),
            "PYTHONPATH": str(PROJECT),
            "BROKERS": deployed.bootstrap_servers,
        },
    )
    yield book
    assert book.left == [], "the test does not follow it to its end"


def _put_tools(folder: Path, stack: Stack) -> None:
    """Scripts with the names that Kafka's own have, and nothing else in them."""
    folder.mkdir()
    logging = folder / "log4j2.properties"
    logging.write_text(kafka.TOOLS_LOGGING)
    runtime = Runtime.find(stack.directory / "jars", Display())
    for name, main in kafka.TOOLS.items():
        command = shlex.join(runtime.command(f"-Dlog4j2.configurationFile={logging}", main))
        script = folder / name
        script.write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        script.chmod(0o755)
