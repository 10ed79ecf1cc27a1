"""How far a long command is: a bar on a terminal, a few lines elsewhere, nothing beside JSON. Always on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn


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


@contextmanager
def display(verb: str, *, quiet: bool) -> Iterator[Display]:
    """`verb` says in the past tense what is done to each."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield Silent() if quiet else Lines(verb)
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console, transient=True) as progress:
        yield Bar(progress, progress.add_task(verb, total=None))
