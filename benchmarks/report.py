"""Results for people: tables on standard output."""

from __future__ import annotations

from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import verdicts
from benchmarks.results import Results

WIDTH = 120
PARTS = ("subject", "postgres", "broker")


def show(results: Results) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH)
    _say_where(console, results)
    if results.runs:
        console.print(_throughput(results))
    for run in results.wrong:
        console.print(Text(f"WRONG {run.subject}, repetition {run.repetition + 1}: {'; '.join(run.wrong)}", "bold red"))
    promised = list(verdicts.verdicts(results))
    if promised:
        console.print(_verdicts(promised))


def as_json(results: Results) -> dict[str, Any]:
    from dataclasses import asdict

    return {
        **asdict(results),
        "ok": not results.wrong,
        "verdicts": [asdict(verdict) | {"ok": verdict.ok} for verdict in verdicts.verdicts(results)],
    }


def _say_where(console: Console, results: Results) -> None:
    facts = ", ".join(f"{name} {value}" for name, value in results.machine.items())
    console.print(facts, highlight=False, style="dim")
    for server, settings in results.settings.items():
        console.print(
            f"{server}: " + ", ".join(f"{name} = {value}" for name, value in settings.items()),
            highlight=False,
            style="dim",
        )


def _throughput(results: Results) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="throughput: medians", title_justify="left")
    table.add_column("")
    table.add_column("")
    for name in ("msg/s", "lowest", "highest", "records"):
        table.add_column(name, justify="right")
    for part in PARTS:
        table.add_column(f"{part}\nµs/msg", justify="right")
    for name in dict.fromkeys(run.subject for run in results.runs):
        rates = list(results.rates(name).values())
        records = next(run.records for run in results.runs if run.subject == name)
        cpu = results.cpu(name)
        table.add_row(
            name,
            results.titles.get(name, ""),
            *([f"{median(rates):,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}"] if rates else ["WRONG", "", ""]),
            f"{records:,}",
            *(f"{median(cpu[part]):,.1f}" if cpu.get(part) else "" for part in PARTS),
        )
    for name in dict.fromkeys(ceiling.name for ceiling in results.ceilings):
        rates = list(results.rates(name).values())
        title = next(ceiling.title for ceiling in results.ceilings if ceiling.name == name)
        table.add_row(
            name, f"limit: {title}", f"{median(rates):,.0f}", f"{min(rates):,.0f}", f"{max(rates):,.0f}", style="dim"
        )
    return table


def _verdicts(promised: list[verdicts.Verdict]) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="must show: medians of the ratios of each repetition", title_justify="left"
    )
    table.add_column("")
    table.add_column("measured", justify="right")
    table.add_column("threshold", justify="right")
    table.add_column("")
    for verdict in promised:
        table.add_row(
            verdict.text,
            f"{verdict.value:,.2f} {verdict.unit}",
            f"{verdict.relation} {verdict.threshold:g} {verdict.unit}",
            Text("yes", "green") if verdict.ok else Text("no", "bold red"),
        )
    return table
