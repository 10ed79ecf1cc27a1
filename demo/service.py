"""Runs the processor as a deployment does: by its command line, in its own process, with settings from variables."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

from demo.errors import DemoError
from processor.service import supervisor

ROOT = Path(__file__).resolve().parent.parent
CONFIG = Path("config/orders.toml")
STOP_SECONDS = 30.0


class Service:
    """`processor run`, at most one at a time. It stops by itself if this process ends, for whatever reason."""

    def __init__(self, environment: Mapping[str, str], log: Path) -> None:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
        self._environment = {**inherited, **environment, "PROCESSOR_LOG_FORMAT": "json", "PROCESSOR_LOG_LEVEL": "info"}
        self._log_path = log
        self._log: BinaryIO | None = None
        self._read_from = 0
        self._process: asyncio.subprocess.Process | None = None
        self._watched, self._held = os.pipe()

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def migrate(self) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "processor", "migrate", str(CONFIG)),
            cwd=ROOT,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            with suppress(ProcessLookupError):
                process.kill()
            raise
        if process.returncode != 0:
            raise DemoError(f"processor migrate failed: {_last_line(output)}")

    async def start(self, failpoints: str = "") -> None:
        if self._log is None:
            self._log_path.parent.mkdir(parents=True, exist_ok=True)
            self._log = self._log_path.open("wb")
        self._read_from = self._log_path.stat().st_size
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "processor", "run", str(CONFIG)),
            cwd=ROOT,
            env={**self._environment, "PROCESSOR_FAILPOINTS": failpoints, supervisor.PIPE: str(self._watched)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            pass_fds=(self._watched,),
            start_new_session=True,  # Ctrl-C reaches only us, and we stop it in order
        )

    async def kill(self) -> None:
        """Send SIGKILL, which leaves no time to log or save anything."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    def ended(self) -> int | None:
        """Return its exit code if it has ended, negative for a signal."""
        assert self._process is not None
        return self._process.returncode

    async def stop(self) -> int:
        """Send SIGTERM and wait, as an orchestrator does."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(STOP_SECONDS):
                return await self._process.wait()
        except TimeoutError:
            raise DemoError(f"the processor did not stop within {STOP_SECONDS:.0f} s") from None

    async def close(self) -> None:
        """End the process if it still runs, and close its log and pipe."""
        if self._process is not None and self._process.returncode is None:
            await self.kill()
        if self._log is not None:
            self._log.close()
            self._log = None
        for descriptor in (self._watched, self._held):
            with suppress(OSError):
                os.close(descriptor)

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events logged since the last start."""
        with self._log_path.open("rb") as log:
            log.seek(self._read_from)
            for line in log:
                with suppress(ValueError):
                    yield json.loads(line)

    def last_line(self) -> str:
        return _last_line(self._log_path.read_bytes())


def _last_line(output: bytes) -> str:
    lines = output.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else "it printed nothing"
