"""Shows the story: progress bars on a terminal, plain lines elsewhere, nothing for --json."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Self

import rich.live
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.table import Table
from rich.text import Text

from demo.summary import Summary

LINE_EVERY_SECONDS = 2.0


class Show:
    """Shows nothing; the others override it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def say(self, text: str, style: str = "") -> None:
        """Report an event of the story."""

    def begin(self, records: int, orders: int) -> None:
        """Start the bars; the numbers are their maxima."""

    def progress(self, fed: int, in_postgres: int, in_kafka: int, kills: int) -> None:
        """Update the bars."""

    def end(self) -> None:
        """Remove the bars."""

    def summary(self, summary: Summary) -> None:
        """Show the result."""


class Lines(Show):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._next = 0.0
        self._records = self._orders = 0

    def say(self, text: str, style: str = "") -> None:
        self._print(f"{time.monotonic() - self._started:5.1f} s  {text}")

    def begin(self, records: int, orders: int) -> None:
        self._records, self._orders = records, orders

    def progress(self, fed: int, in_postgres: int, in_kafka: int, kills: int) -> None:
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_EVERY_SECONDS
            of = f"/{self._orders:,}"
            done = f"{in_postgres:,}{of} done in Postgres, {in_kafka:,}{of} answered in Kafka"
            self.say(f"{fed:,}/{self._records:,} records fed, {done}, {kills} kills")

    def summary(self, summary: Summary) -> None:
        for name, value, remark in summary.lines():
            self._print(f"{name:<11} {value:>10}  {remark}".rstrip())
        self._print(summary.verdict_line())

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)


class Live(Show):
    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._kills = 0
        self._bars = Progress(
            SpinnerColumn(finished_text="[green]✓[/]"),
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=32),
            _Numbers(),
            console=console,
        )
        self._live = rich.live.Live(
            console=console, get_renderable=self._picture, transient=True, refresh_per_second=10
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def say(self, text: str, style: str = "") -> None:
        seconds = f"[dim]{time.monotonic() - self._started:5.1f} s[/]"
        body = f"[{style}]{escape(text)}[/]" if style else escape(text)
        grid = Table.grid(padding=(0, 2))
        grid.add_row(seconds, body)
        self._console.print(grid, highlight=False)

    def begin(self, records: int, orders: int) -> None:
        self._fed = self._bars.add_task("records fed", total=records)
        self._postgres = self._bars.add_task("done in Postgres", total=orders)
        self._kafka = self._bars.add_task("answered in Kafka", total=orders)
        self._live.start()

    def progress(self, fed: int, in_postgres: int, in_kafka: int, kills: int) -> None:
        self._bars.update(self._fed, completed=fed)
        self._bars.update(self._postgres, completed=in_postgres)
        self._bars.update(self._kafka, completed=in_kafka)
        self._kills = kills

    def _picture(self) -> Group:
        return Group(self._bars, Text(f"  SIGKILLs so far   {'✗ ' * self._kills or '–'}", style="red"))

    def end(self) -> None:
        self._live.stop()

    def summary(self, summary: Summary) -> None:
        table = Table(box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column(style="dim")
        for name, value, remark in summary.lines():
            style = ""
            if name in ("lost", "doubled", "wrong"):
                style = "bold green" if value == "0" else "bold red"
            table.add_row(name, Text(value, style=style), Text(remark))
        colour = "green" if summary.ok else "red"
        self._console.print(
            Panel(
                table,
                title=f"[bold {colour}]{escape(summary.verdict_line())}[/]",
                title_align="left",
                border_style=colour,
                expand=False,
            )
        )


class _Numbers(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(f"{int(task.completed):>9,} / {int(task.total or 0):,}", style="dim")


def suited(*, silent: bool) -> Show:
    """Return the show that suits standard output."""
    if silent:
        return Show()
    console = Console()
    return Live(console) if console.is_terminal else Lines(console)
