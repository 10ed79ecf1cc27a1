"""Results for people: tables on standard output."""

from __future__ import annotations

from dataclasses import asdict
from statistics import median
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks import against, stats, verdicts
from benchmarks.distance import NEAR
from benchmarks.growth import BYTES
from benchmarks.rebalance import BACKLOG, CALM, JOIN, KILL, LEAVE, RESTART
from benchmarks.results import Results
from benchmarks.retention import Retention
from benchmarks.workload import VALUE_BYTES

WIDTH = 120
MARKDOWN_WIDTH = 200
PARTS = ("subject", "postgres", "broker")


def show(results: Results, *, markdown: bool = False) -> None:
    console = Console()
    if markdown or not console.is_terminal:
        console = Console(width=MARKDOWN_WIDTH if markdown else WIDTH)

    def show_table(table: Table) -> None:
        if markdown:
            table.box = box.MARKDOWN
            for column in table.columns:
                column.header = str(column.header).replace("\n", " ")
        console.print(table)

    _say_where(console, results)
    if results.runs:
        show_table(_throughput(results))
    if results.latencies:
        show_table(_latency(results))
    if results.comparisons:
        show_table(_comparisons(results))
    if results.points:
        show_table(_growth(results))
    if results.stalls:
        show_table(_rebalances(results))
    if results.distances:
        show_table(_distances(results))
    for figure in results.replays:
        console.print(f"{figure.name}: {figure.text}", highlight=False)
    if results.soak is not None and not results.soak.wrong:
        soak = results.soak
        console.print(
            f"soak: {soak.minutes:g} minutes at {soak.per_second} msg/s, memory at most {soak.highest_mb:.0f} MB,"
            f" last fifth / second fifth {soak.flatness:.3f}, p99 {soak.p99_ms:.0f} ms",
            highlight=False,
        )
    if results.retention is not None and results.retention.cycles:
        show_table(_cycles(results.retention))
    if results.audit is not None and not results.audit.wrong:
        audit = results.audit
        console.print(
            f"audit: {audit.messages:,} messages and as many outputs in {audit.seconds:.0f} s,"
            f" {audit.rate:,.0f} records a second, memory at most {audit.highest_mb:.0f} MB;"
            f" interrupted at {audit.interrupted_at:,}",
            highlight=False,
        )
    for line in results.wrong:
        console.print(Text(line, "bold red"))
    shares = _shares(results)
    if shares:
        console.print(f"share of the limits: {', '.join(shares)}", highlight=False)
    promised = list(verdicts.verdicts(results))
    if promised:
        show_table(_verdicts(promised))


def as_json(results: Results) -> dict[str, Any]:
    return {
        **asdict(results),
        "ok": not results.wrong,
        "summaries": [asdict(summary) for summary in against.summaries(results.comparisons)],
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


def _shares(results: Results) -> list[str]:
    found = []
    for name, limit in (
        ("batch", "sql-1"),
        ("batch", "pgbench-1"),
        ("batch-2", "pgbench-2"),
        ("batch", "produce-2000"),
    ):
        share = stats.ratio(results.rates(name), results.rates(limit))
        if share is not None:
            found.append(f"{name} is {share:.0%} of {limit}")
    return found


def _latency(results: Results) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, title="latency, producer to committed reader: medians, in ms", title_justify="left"
    )
    table.add_column("")
    for name in ("p50 at 500 msg/s", "p99", "p50 from idle", "p99"):
        table.add_column(name, justify="right")
    for name in dict.fromkeys(one.subject for one in results.latencies):
        columns = [results.delays(name, each) for each in ("p50", "p99", "idle_p50", "idle_p99")]
        table.add_row(name, *(f"{median(values.values()):,.1f}" if values else "WRONG" for values in columns))
    return table


def _comparisons(results: Results) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="this working tree beside another version: medians; ratios this / other of each pair",
        title_justify="left",
    )
    table.add_column("")
    table.add_column("beside")
    table.add_column("")
    for name in ("this", "other", "ratio", "lowest", "highest", "pairs"):
        table.add_column(name, justify="right")
    for one in against.summaries(results.comparisons):
        digits = 0 if one.unit == against.RATE else 1
        table.add_row(
            one.subject,
            one.revision,
            one.unit,
            *(f"{value:,.{digits}f}" for value in (one.this, one.other)),
            *(f"{value:.2f}" for value in (one.ratio, one.lowest, one.highest)),
            f"{one.pairs}",
        )
    return table


def _growth(results: Results) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="growth: medians", title_justify="left")
    table.add_column("")
    for name in ("", "msg/s", "MB/s", "/ base run beside it"):
        table.add_column(name, justify="right")
    for axis in dict.fromkeys(point.axis for point in results.points):
        for x, points in results.growth(axis).items():
            rate = median(point.rate or 0.0 for point in points)
            bytes_ = x if axis == BYTES else VALUE_BYTES
            share = median(point.share for point in points)
            table.add_row(axis, f"{x:,}", f"{rate:,.0f}", f"{rate * bytes_ / 1e6:,.1f}", f"{share:.2f} ×")
    return table


def _rebalances(results: Results) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD,
        title="members come and go: longest, producer to committed reader, in ms",
        title_justify="left",
    )
    table.add_column("")
    for name in ("msg/s", "calm\np99"):
        table.add_column(name, justify="right")
    for event in ("join", "leave", "kill"):
        table.add_column(f"{event}\nmoved", justify="right")
        table.add_column(f"{event}\nstayed", justify="right")
    for name in ("without\nany output", "noise"):
        table.add_column(name, justify="right")
    for of in results.rebalances():
        values = [results.worst(of, [CALM], "p99_ms")]
        for events in ([JOIN], [LEAVE], [KILL, RESTART]):
            values += [results.worst(of, events, "moved_ms"), results.worst(of, events, "stayed_ms")]
        values.append(results.worst(of, [CALM, JOIN, LEAVE, KILL, RESTART, BACKLOG], "gap_ms"))
        profile, per_second = of
        table.add_row(
            profile,
            f"{per_second:,}" if per_second else "",
            *("" if value is None else f"{value:,.0f}" for value in values),
            f"{len(results.noise(of))}",
        )
    return table


def _cycles(retention: Retention) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="the inbox after each cycle", title_justify="left")
    for name in ("cycle", "rows", "table MB", "index MB"):
        table.add_column(name, justify="right")
    for one in retention.cycles:
        table.add_row(f"{one.number}", f"{one.rows:,}", f"{one.heap / 1e6:.1f}", f"{one.index / 1e6:.1f}")
    return table


def _distances(results: Results) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="distance to Postgres: msg/s, medians", title_justify="left")
    table.add_column("")
    table.add_column("")
    places = list(dict.fromkeys(sorted((one.place for one in results.distances), key=_delay)))
    for place in places:
        took = median(one.round_trip_ms for one in results.distances if one.place == place)
        table.add_column(f"{place}\n{took:.2f} ms", justify="right")
    for name in ("records\nper batch", "round trips\nper batch"):
        table.add_column(name, justify="right")
    table.add_column("")
    for name in dict.fromkeys(one.subject for one in results.distances):
        rates = [results.away(name, place).values() for place in places]
        batches = [one for one in results.distances if one.subject == name and one.batch is not None]
        last = batches[-1] if batches else None
        table.add_row(
            name,
            results.titles.get(name, ""),
            *(f"{median(values):,.0f}" if values else "" for values in rates),
            *((f"{last.batch:,}", f"{sum(last.round_trips.values()):,}") if last else ("", "")),
            ", ".join(f"{purpose} {number:,}" for purpose, number in last.round_trips.items()) if last else "",
        )
    return table


def _delay(place: str) -> float:
    return -1.0 if place == NEAR else float(place.removesuffix(" ms"))


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
