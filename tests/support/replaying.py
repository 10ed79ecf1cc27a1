"""`processor replay` as an operator runs it, and what tests compare before and after it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from tests.support import sending, sql
from tests.support.deployments import PROJECT, Deployment

if TYPE_CHECKING:
    from tests.conftest import Start
    from tests.support.sending import Sent

SECONDS = 60


def processor(deployed: Deployment, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
    return subprocess.run(
        [sys.executable, "-m", "processor", *arguments],
        cwd=PROJECT,
        env=inherited | deployed.environment | environ,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def replay(deployed: Deployment, verb: str, *arguments: str, **environ: str) -> dict[str, Any]:
    """Run it, expect it to succeed, and return what it reports."""
    done = processor(deployed, "replay", verb, str(deployed.config), *arguments, "-o", "json", **environ)
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def serve(deployed: Deployment, start: Start, *records: Sent, **environ: str) -> None:
    """Let the service process these, and whatever else is there."""
    sending.send(deployed.bootstrap_servers, deployed.input_topic, records)
    service = start(deployed, **environ)
    service.wait_for_partitions(deployed.partitions)
    deployed.verifier().wait_until_done()
    service.terminate()
    assert service.wait() == 0, service.tail()


def copy_of(database: str, name: str) -> str:
    """The database as a dump taken now would restore it; nobody may be connected to it."""
    sql.execute(
        sql.with_database(database, "postgres"), f"CREATE DATABASE {name} TEMPLATE {database.rpartition('/')[2]}"
    )
    return sql.with_database(database, name)


def domain(database: str) -> dict[str, list[tuple[Any, ...]]]:
    """Everything that the inventory's handlers have written, without the times."""
    return {
        "reservations": [
            tuple(row)
            for row in sql.fetch(database, "SELECT order_id, sku, quantity FROM reservations ORDER BY 1, 2, 3")
        ],
        "stock": [tuple(row) for row in sql.fetch(database, "SELECT sku, on_hand, reserved FROM stock ORDER BY 1")],
    }


@contextmanager
def started(deployed: Deployment, verb: str, *arguments: str, **environ: str) -> Iterator[subprocess.Popen[str]]:
    """Run it beside the test; it is killed if it has not ended."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
    command = [sys.executable, "-m", "processor", "replay", verb, str(deployed.config), *arguments]
    with subprocess.Popen(
        command,
        cwd=PROJECT,
        env=inherited | deployed.environment | environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as running:
        try:
            yield running
        finally:
            if running.poll() is None:
                running.kill()
