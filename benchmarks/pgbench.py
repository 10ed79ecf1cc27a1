"""The recorded transactions as a script for pgbench: its own client, its own clock, values written out.

pgbench sends text where the engine sends prepared statements with binary arrays, so it is not always the
faster of the two; the limit is whichever is.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any
from urllib.parse import unquote, urlsplit

from benchmarks.errors import BenchError
from benchmarks.recording import Recording, Statement
from processor.stack.postgres import INSTALLATION, PACKAGE

SECONDS = 300.0


def run(recordings: Sequence[Recording], database: str) -> float:
    """One client for each recording, all at once; gives records per second."""
    with NamedTemporaryFile("w", suffix=".sql") as script:
        script.writelines(_script(recordings))
        script.flush()
        return _run(recordings, database, script.name)


def _run(recordings: Sequence[Recording], database: str, script: str) -> float:
    address = urlsplit(database)
    clients = str(len(recordings))
    done = subprocess.run(
        [
            _binary(),
            *("--no-vacuum", "--client", clients, "--jobs", clients, "--transactions", "1"),
            *("--host", address.hostname or "", "--port", str(address.port), "--username", address.username or ""),
            *("--file", script, address.path.lstrip("/")),
        ],
        env={**os.environ, "PGPASSWORD": unquote(address.password or "")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    found = re.search(r"^tps = ([\d.]+)", done.stdout, re.MULTILINE)
    if done.returncode != 0 or found is None:
        raise BenchError(f"pgbench failed: {' '.join((done.stderr or done.stdout).split())[-300:]}")
    # Each client's whole recording is one transaction of pgbench's.
    return float(found[1]) * sum(recording.records for recording in recordings) / len(recordings)


def literal(value: Any) -> str:
    """A value as SQL text."""
    match value:
        case None:
            return "NULL"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case bytes():
            return f"'\\x{value.hex()}'::bytea"
        case list() | tuple():
            return _quoted("{" + ",".join(map(_element, value)) + "}")
        case _:
            return _quoted(str(value))


def _script(recordings: Sequence[Recording]) -> Iterator[str]:
    for client, recording in enumerate(recordings):
        if len(recordings) > 1:
            yield f"\\if :client_id = {client}\n"
        for transaction in recording.transactions:
            for statement in transaction.statements:
                yield _text(statement)
        if len(recordings) > 1:
            yield "\\endif\n"


def _text(statement: Statement) -> str:
    sql, arguments = statement
    values = list(map(literal, arguments))
    text = re.sub(r"\$(\d+)", lambda found: values[int(found[1]) - 1], sql)
    return f"{text.strip().rstrip(';')};\n"


def _element(value: Any) -> str:
    match value:
        case None:
            return "NULL"
        case bool() | int() | float():
            return str(value)
        case bytes():
            return f'"\\\\x{value.hex()}"'
        case _:
            escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{escaped}"'


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _binary() -> str:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / INSTALLATION / "bin" / "pgbench")
