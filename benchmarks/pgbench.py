"""The recorded transactions as a script for pgbench: its own client, its own clock.

pgbench knows no arrays. The large arguments are put into tables beforehand, and the script's statements take them
from there: that leaves almost nothing of the client and the wire.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import uuid
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from benchmarks import database
from benchmarks.errors import BenchError
from benchmarks.recording import COPY, Recording, Statement
from processor.stack.postgres import INSTALLATION, PACKAGE

if TYPE_CHECKING:
    from benchmarks.database import Connection

SECONDS = 300.0


def run(recordings: Sequence[Recording], url: str) -> float:
    """One client for each recording, all at once; returns records per second."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # the server, maybe another user, reads the data of COPY from here
        script = Path(folder) / "script.sql"
        texts = database.connected(url, lambda connection: _Script(connection, Path(folder)).write(recordings))
        script.write_text("".join(texts))
        return _run(recordings, url, script)


def _run(recordings: Sequence[Recording], url: str, script: Path) -> float:
    address = urlsplit(url)
    clients = str(len(recordings))
    done = subprocess.run(
        [
            _binary(),
            *("--no-vacuum", "--client", clients, "--jobs", clients, "--transactions", "1"),
            *("--host", address.hostname or "", "--port", str(address.port), "--username", address.username or ""),
            *("--file", str(script), address.path.lstrip("/")),
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
    # To pgbench, a client's whole recording is one transaction.
    return float(found[1]) * sum(recording.records for recording in recordings) / len(recordings)


def literal(value: Any) -> str:
    """A small value as SQL text."""
    match value:
        case None:
            return "NULL"
        case bool():
            return "true" if value else "false"
        case int() | float():
            return str(value)
        case _:
            return "'" + str(value).replace("'", "''") + "'"


class _Script:
    def __init__(self, connection: Connection, folder: Path) -> None:
        self._connection = connection
        self._folder = folder
        self._types: dict[str, list[str]] = {}  # of the parameters, by SQL
        self._staged: dict[str, list[tuple[int, Any]]] = defaultdict(list)  # by type

    async def write(self, recordings: Sequence[Recording]) -> list[str]:
        """The lines of the script; puts the tables that they refer to into the database."""
        texts = []
        for client, recording in enumerate(recordings):
            texts.append(f"\\if :client_id = {client}\n")
            for transaction in recording.transactions:
                texts += [await self._text(statement) for statement in transaction.statements]
            texts.append("\\endif\n")
        await self._connection.execute("CREATE SCHEMA staged")
        for type_, rows in self._staged.items():
            table = _table(type_)
            await self._connection.execute(
                f"CREATE TABLE staged.{table} (id integer PRIMARY KEY, value {type_} STORAGE EXTERNAL)"
            )
            await self._connection.copy_records_to_table(table, schema_name="staged", records=rows)
            await self._connection.execute(f"ANALYZE staged.{table}")
        await self._connection.execute("CHECKPOINT")
        return texts

    async def _text(self, statement: Statement) -> str:
        sql, arguments = statement
        if sql == COPY:
            return self._copied(*arguments)
        if arguments and sql not in self._types:
            prepared = await self._connection.prepare(sql)
            self._types[sql] = [parameter.name for parameter in prepared.get_parameters()]
        values = [
            self._stage(type_, value) if isinstance(value, list | bytes) else literal(value)
            for type_, value in zip(self._types.get(sql, ()), arguments, strict=True)
        ]
        text = re.sub(r"\$(\d+)", lambda found: values[int(found[1]) - 1], sql)
        return f"{text.strip().rstrip(';')};\n"

    def _stage(self, type_: str, value: Any) -> str:
        rows = self._staged[type_]
        rows.append((len(rows), value))
        return f"(SELECT value FROM staged.{_table(type_)} WHERE id = {len(rows) - 1})"  # noqa: S608 - names of our own

    def _copied(self, table: str, options: dict[str, Any], data: bytes) -> str:
        """pgbench cannot send the data of a COPY, but the server can read them from a file."""
        path = self._folder / f"{uuid.uuid4().hex}.copy"
        path.write_bytes(data)
        columns = ", ".join(f'"{column}"' for column in options.get("columns") or ())
        return (
            f'COPY "{table}" {f"({columns})" if columns else ""} FROM {literal(str(path))}'
            f" WITH (FORMAT {options.get('format') or 'text'});\n"
        )


def _table(type_: str) -> str:
    return re.sub(r"\W+", "_", type_) + "values"


def _binary() -> str:
    spec = importlib.util.find_spec(PACKAGE)
    assert spec is not None
    assert spec.origin is not None
    return str(Path(spec.origin).parent / INSTALLATION / "bin" / "pgbench")
