"""Processes that outlive us, and how to know them again.

A pid alone proves nothing: it may be left over from a crash and belong to somebody else today. A server
of ours is a pid together with its creation time; nothing here signals a process without checking both.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel

POLL_SECONDS = 0.02


class ProcessId(BaseModel, frozen=True):
    """A process that cannot be confused with a later one of the same pid."""

    pid: int
    created: str

    @classmethod
    def of(cls, process: psutil.Process) -> ProcessId:
        return cls(pid=process.pid, created=_creation_time(process))

    def find(self) -> psutil.Process | None:
        """The live process, or None if it has ended (a zombie has) or the pid was given to another."""
        try:
            process = psutil.Process(self.pid)
            return None if _creation_time(process) != self.created or has_ended(process) else process
        except psutil.NoSuchProcess:
            return None


def _creation_time(process: psutil.Process) -> str:
    """When it was created, in a form that never changes while it lives.

    Linux counts from the boot; psutil turns that into a date, which moves when the clock is set.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return str(process.create_time())
    return f"{boot}/{fields[19]}"


@dataclass(frozen=True)
class Account:
    """The system user a server runs as, when it must not be ours."""

    name: str
    uid: int
    gid: int

    def options(self) -> dict[str, Any]:
        """Arguments for `subprocess` that drop every privilege we have."""
        return {"user": self.uid, "group": self.gid, "extra_groups": [], "umask": 0o077}


def spawn(
    command: Sequence[str | Path],
    *,
    directory: Path,
    output: Path,
    environment: Mapping[str, str],
    account: Account | None = None,
) -> ProcessId:
    """Start a server in a session of its own, its output appended to a file.

    A shell in between puts it in the background and leaves: the server is nobody's child here, so
    it never becomes a zombie of ours, and Ctrl-C in our terminal does not reach it.
    """
    with output.open("ab") as log:
        launcher = subprocess.run(
            ["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *map(str, command)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            cwd=directory,
            env=dict(environment),
            start_new_session=True,
            check=True,
            **(account.options() if account else {}),
        )
    pid = int(launcher.stdout)
    try:
        return ProcessId.of(psutil.Process(pid))
    except psutil.NoSuchProcess:
        # Gone already: an identity nothing will match, so that whoever waits for it sees it ended.
        return ProcessId(pid=pid, created="")


def find_by_argument(argument: str) -> ProcessId | None:
    """A running process of ours with exactly this argument, such as its own configuration file.

    Finds a server whose starter was killed before it could write the pid down.
    """
    for process in psutil.process_iter(["cmdline"]):
        arguments: list[str] = process.info["cmdline"] or []
        if argument in arguments[1:]:
            try:
                return ProcessId.of(process)
            except psutil.NoSuchProcess:
                continue
    return None


def family(process: psutil.Process) -> list[psutil.Process]:
    """The process, then its descendants; just the process if it is ending meanwhile."""
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return [process]


def send(processes: Iterable[psutil.Process], number: signal.Signals) -> None:
    """Signal each one that still exists. psutil compares creation times before it signals."""
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def has_ended(process: psutil.Process) -> bool:
    """Whether nothing of it is left, except perhaps an entry its parent has not collected yet.

    The first thread of a killed process may be a zombie while others still hold its ports and files.
    """
    try:
        if not process.is_running():
            return True
        return process.status() == psutil.STATUS_ZOMBIE and process.num_threads() <= 1
    except psutil.NoSuchProcess:
        return True


def is_stopped(process: psutil.Process) -> bool:
    try:
        return process.status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def wait_until(condition: Callable[[], bool], seconds: float, cancelled: threading.Event | None = None) -> bool:
    """Poll a real condition until it holds; False if the time is over or the wait was cancelled."""
    pause = cancelled or threading.Event()
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline or pause.wait(POLL_SECONDS):
            return False
    return True


def clean_environment(*prefixes: str) -> dict[str, str]:
    """Our environment without the variables that would reconfigure the server behind our back."""
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def one_line(text: str, limit: int = 300) -> str:
    """The end of what a program said, fit for an error message."""
    return " ".join(text.split())[-limit:]
