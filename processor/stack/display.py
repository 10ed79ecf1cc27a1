"""How `up` tells what it is doing: a live bar on a terminal, plain lines elsewhere, or nothing."""

from __future__ import annotations

import threading
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

MEGABYTE = 1_000_000
LINE_EVERY_FILES = 15


class Display:
    """Says nothing: what the Python interface uses unless told otherwise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def begin(self, text: str, total: int | None = None) -> None:
        """A step begins; `total` is its number of files, where known."""

    def received(self, size: int) -> None:
        """Bytes arrived. Called from several threads."""

    def file_done(self) -> None:
        """One file is complete. Called from several threads."""


class Lines(Display):
    """A line per step, and one now and then while files arrive."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._guard = threading.Lock()
        self._text = ""
        self._total: int | None = None
        self._files = 0
        self._bytes = 0

    def begin(self, text: str, total: int | None = None) -> None:
        self._text, self._total, self._files, self._bytes = text, total, 0, 0
        self._print(text)

    def received(self, size: int) -> None:
        with self._guard:
            self._bytes += size

    def file_done(self) -> None:
        with self._guard:
            self._files += 1
            if self._files % LINE_EVERY_FILES == 0 or self._files == self._total:
                of = f"/{self._total}" if self._total else ""
                self._print(f"{self._text}: {self._files}{of} files, {self._bytes / MEGABYTE:.0f} MB")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Bar(Display):
    """One line that moves, gone when the work is done."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=16),
            TextColumn("{task.fields[detail]}", markup=False),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )
        self._guard = threading.Lock()
        self._task: TaskID | None = None
        self._total: int | None = None
        self._files = 0
        self._bytes = 0

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def begin(self, text: str, total: int | None = None) -> None:
        if self._task is not None:
            self._progress.remove_task(self._task)
        self._total, self._files, self._bytes = total, 0, 0
        self._task = self._progress.add_task(text, total=total, detail="")

    def received(self, size: int) -> None:
        with self._guard:
            self._bytes += size
            self._show()

    def file_done(self) -> None:
        with self._guard:
            self._files += 1
            self._show()

    def _show(self) -> None:
        assert self._task is not None
        files = f"{self._files}/{self._total} files, " if self._total else ""
        detail = f"{files}{self._bytes / MEGABYTE:.1f} MB"
        self._progress.update(self._task, completed=self._files, detail=detail)


def display(*, quiet: bool) -> Display:
    """What suits standard error as it is now."""
    if quiet:
        return Display()
    console = Console(stderr=True)
    return Bar(console) if console.is_terminal else Lines(console)
