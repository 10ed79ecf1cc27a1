"""What a person sees while it runs: a line that moves on a terminal, a line per step elsewhere, nothing for --json."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.status import Status


class Show:
    """Prints nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def step(self, text: str) -> None:
        """Something begins that takes a while."""

    def progress(self, done: int, of: int) -> None:
        """How far the step is."""

    def say(self, text: str) -> None:
        """A step has ended."""


class Lines(Show):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        line = f"{time.monotonic() - self._started:6.1f} s  {text}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class Live(Lines):
    def __init__(self, console: Console) -> None:
        super().__init__(console)
        self._status = Status("", console=console)
        self._step = ""

    def __enter__(self) -> Self:
        self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._status.stop()

    def step(self, text: str) -> None:
        self._step = text
        self._status.update(text)

    def progress(self, done: int, of: int) -> None:
        self._status.update(f"{self._step}: {done:,} of {of:,}")


def suited(*, silent: bool) -> Show:
    """The one that suits standard error; standard output is for the result."""
    if silent:
        return Show()
    console = Console(stderr=True)
    return Live(console) if console.is_terminal else Lines(console)
