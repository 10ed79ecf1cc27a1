"""How far a long command is: a bar on a terminal, a few lines elsewhere, nothing beside JSON. Always on stderr."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    Task,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text


class Display(Protocol):
    def begin(self, total: int) -> None:
        """None is done yet."""

    def done(self, number: int, total: int) -> None:
        """This many are done. The total may grow."""

    def waiting(self, text: str) -> None:
        """Nothing is left to do but wait; the text says for what, and changes while time passes."""


class Silent:
    def begin(self, total: int) -> None:
        return None

    def done(self, number: int, total: int) -> None:
        return None

    def waiting(self, text: str) -> None:
        return None


class Lines(Silent):
    """A line for each tenth, and one for all the waiting."""

    def __init__(self, verb: str) -> None:
        self._verb = verb
        self._shown = 0
        self._waits = False

    def done(self, number: int, total: int) -> None:
        if number - self._shown >= max(total / 10, 1) or number == total:
            self._shown = number
            typer.echo(f"{self._verb} {number} of {total}", err=True)

    def waiting(self, text: str) -> None:
        if not self._waits:
            self._waits = True
            typer.echo(text, err=True)


class PacedLines(Lines):
    """With the rate, and how long the rest will take at it."""

    def __init__(self, verb: str) -> None:
        super().__init__(verb)
        self._verb = verb
        self._began: tuple[float, int] | None = None
        self._next = 0

    def done(self, number: int, total: int) -> None:
        now = time.monotonic()
        if self._began is None:
            self._began = now, number
            self._next = number
        if number < self._next:
            return
        self._next = number + max(total // 10, 1) if number < total else total + 1
        began, before = self._began
        rate = (number - before) / (now - began) if now > began else 0.0
        left = f", {rate:,.0f} a second, {(total - number) / rate:.0f} s left" if rate else ""
        typer.echo(f"{self._verb} {number} of {total}{left}", err=True)


class Bar:
    """One line that moves, and is gone when the work is done."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def begin(self, total: int) -> None:
        self._progress.update(self._task, total=total)

    def done(self, number: int, total: int) -> None:
        self._progress.update(self._task, completed=number, total=total)

    def waiting(self, text: str) -> None:
        self._progress.update(self._task, description=text)


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{task.finished_speed or task.speed or 0:,.0f}/s")


@contextmanager
def display(verb: str, *, quiet: bool, paced: bool = False) -> Iterator[Display]:
    """`verb` says in the past tense what is done to each; `paced` shows the rate and the time that is left too."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Silent() if quiet else PacedLines(verb) if paced else Lines(verb)
        return
    columns = [SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [_Rate(), TimeRemainingColumn()] if paced else [TimeElapsedColumn()]
    with Progress(*columns, console=console, transient=True) as progress:
        yield Bar(progress, progress.add_task(verb, total=None))
