"""Subjects as processes of their own, and a keeper that ends them if we are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from benchmarks.errors import BenchError

ROOT = Path(__file__).resolve().parent.parent
STOP_SECONDS = 60.0
COMMAND_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Command:
    """What to run, with which variables added to our own, and from which source tree."""

    arguments: list[str]
    environment: Mapping[str, str]
    tree: Path = ROOT


class Keeper:
    """Our end of a pipe to a process that kills every subject on its list when the pipe breaks."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.processes"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.communicate()

    def watch(self, pid: int) -> None:
        self._say(f"+{pid}\n")

    def forget(self, pid: int) -> None:
        self._say(f"-{pid}\n")

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line.encode())


class Running:
    """One subject at work; it never outlives this block."""

    def __init__(self, keeper: Keeper, command: Command, log: Path) -> None:
        self._keeper = keeper
        self._log_path = log
        self._log = log.open("wb")
        self._process = subprocess.Popen(
            command.arguments,
            cwd=command.tree,
            env=_environment(command.environment),
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C is for us alone
        )
        keeper.watch(self.pid)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait()
        self._keeper.forget(self.pid)
        self._log.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> int | None:
        return self._process.poll()

    def stop(self) -> None:
        """SIGTERM, and wait. A subject that does not stop in time is killed at the end of the block."""
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS)

    def kill(self) -> None:
        """SIGKILL, and wait: it cannot leave its group."""
        self._process.kill()
        self._process.wait()

    def last_words(self) -> str:
        lines = self._log_path.read_text(errors="replace").strip().splitlines()
        return lines[-1][-300:] if lines else "it said nothing"


def call(command: Command) -> str:
    """Run a command to its end; returns its standard output."""
    done = subprocess.run(
        command.arguments,
        cwd=command.tree,
        env=_environment(command.environment),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise BenchError(f"{' '.join(command.arguments[1:4])} failed: {said[-1] if said else 'it said nothing'}")
    return done.stdout


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
    return {**inherited, **added}


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    alive: set[int] = set()
    for line in sys.stdin:
        pid = int(line[1:])
        (alive.add if line[0] == "+" else alive.discard)(pid)
    for pid in alive:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
