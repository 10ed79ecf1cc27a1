"""Draws the pictures of docs/performance.md from result files: `draw.py FOLDER RESULTS...`.

Run by the environment that has matplotlib, so it imports nothing of the project.
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import matplotlib as mpl

mpl.use("svg")
# Text stays text, and ids do not change from run to run: small files and readable differences.
mpl.rcParams |= {
    "svg.fonttype": "none",
    "svg.hashsalt": "benchmarks",
    "font.size": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
}

from matplotlib import pyplot  # noqa: E402 - after the backend was chosen

OURS, REFERENCE, LIMIT = "#1f6f8b", "#b0b0b0", "#e0c080"
PARTS = {"subject": OURS, "postgres": "#8bb8a8", "broker": "#d9d9d9"}
EVENTS = {"join": OURS, "leave": "#8bb8a8", "kill": LIMIT}
PROCESSOR = "processor"  # how the titles of our own subjects begin
# What costs more per message, in µs, would make all other bars invisible.
COMPARABLE = 200.0

Results = dict[str, Any]


def main(folder: Path, files: list[Path]) -> None:
    found: Results = {
        "runs": [],
        "ceilings": [],
        "latencies": [],
        "points": [],
        "stalls": [],
        "titles": {},
        "soak": None,
        "retention": None,
    }
    for file in files:
        results = json.loads(file.read_text())
        for name in ("runs", "ceilings", "latencies", "points", "stalls"):
            found[name] += [one for one in results.get(name, []) if not one.get("wrong")]
        found["titles"] |= results["titles"]
        found["soak"] = results["soak"] or found["soak"]
        found["retention"] = results.get("retention") or found["retention"]
    if found["runs"]:
        throughput(found, folder / "throughput.svg")
        cpu(found, folder / "cpu.svg")
    if found["latencies"]:
        latency(found, folder / "latency.svg")
    for axis in dict.fromkeys(point["axis"] for point in found["points"]):
        growth(found, axis, folder / f"growth-{axis.replace(' ', '-')}.svg")
    rebalances = [stall for stall in found["stalls"] if stall["moved_ms"] is not None]
    if rebalances:
        rebalance(rebalances, folder / "rebalance.svg")
    if found["soak"] and not found["soak"]["wrong"]:
        soak(found["soak"], folder / "soak.svg")
    if found["retention"] and found["retention"]["cycles"]:
        cycles(found["retention"]["cycles"], folder / "retention.svg")


def throughput(results: Results, path: Path) -> None:
    rates = medians(results["runs"], "subject", "rate")
    limits = medians(results["ceilings"], "name", "rate")
    titles = results["titles"] | {one["name"]: f"limit: {one['title']}" for one in results["ceilings"]}
    names = [*rates, *limits]
    values = [*rates.values(), *limits.values()]
    colours = [
        LIMIT if name in limits else OURS if titles.get(name, "").startswith(PROCESSOR) else REFERENCE for name in names
    ]
    figure, axes = pyplot.subplots(figsize=(7.5, 0.32 * len(names) + 0.8), layout="constrained")
    bars = axes.barh([titles.get(name) or name for name in names], values, color=colours)
    axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], padding=3)
    axes.invert_yaxis()
    axes.set_title("messages per second, medians")
    axes.margins(x=0.12)
    save(figure, path)


def cpu(results: Results, path: Path) -> None:
    runs = [{"subject": run["subject"], "total": sum(run["cpu"].values())} for run in results["runs"]]
    names = [name for name, total in medians(runs, "subject", "total").items() if total < COMPARABLE]
    figure, axes = pyplot.subplots(figsize=(7.5, 0.32 * len(names) + 0.9), layout="constrained")
    left = [0.0] * len(names)
    labels = [results["titles"].get(name) or name for name in names]
    for part, colour in PARTS.items():
        values = [
            median([run["cpu"].get(part, 0.0) for run in results["runs"] if run["subject"] == name]) for name in names
        ]
        axes.barh(labels, values, left=left, color=colour, label=part)
        left = [start + value for start, value in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_title("processor time per message, µs, medians")
    figure.legend(frameon=False, ncols=3, loc="outside lower right")
    save(figure, path)


def latency(results: Results, path: Path) -> None:
    figure, axes = pyplot.subplots(figsize=(7.5, 2.6), layout="constrained")
    for place, percentile, colour in ((-0.2, "p50", OURS), (0.2, "p99", LIMIT)):
        values = medians(results["latencies"], "subject", percentile)
        bars = axes.bar([x + place for x in range(len(values))], list(values.values()), 0.4, color=colour)
        axes.bar_label(bars, labels=[f"{value:.0f}" for value in values.values()])
        bars.set_label(percentile)
        axes.set_xticks(range(len(values)), list(values))
    axes.set_title("producer to committed reader at 500 msg/s, ms")
    axes.legend(frameon=False)
    save(figure, path)


def growth(results: Results, axis: str, path: Path) -> None:
    points = [point for point in results["points"] if point["axis"] == axis]
    rates, bases = medians(points, "x", "rate"), medians(points, "x", "base")
    figure, axes = pyplot.subplots(figsize=(5.5, 2.8), layout="constrained")
    axes.plot(list(rates), list(rates.values()), "o-", color=OURS, label="messages per second")
    axes.plot(list(bases), list(bases.values()), ".--", color=REFERENCE, label="base run beside it")
    axes.set_xscale("log")
    axes.set_xlabel(axis)
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
    axes.set_title(f"throughput by {axis}")
    save(figure, path)


def rebalance(stalls: list[Results], path: Path) -> None:
    groups = list(dict.fromkeys((stall["profile"], stall["per_second"]) for stall in stalls))
    series = [(event, what) for event in ("join", "leave", "kill") for what in ("moved", "stayed")]
    width = 0.8 / len(series)
    figure, axes = pyplot.subplots(figsize=(7.5, 3.2), layout="constrained")
    for place, (event, what) in enumerate(series):
        bars: dict[int, float] = {}
        for x, group in enumerate(groups):
            values = [
                stall[f"{what}_ms"] or 0.0
                for stall in stalls
                if (stall["profile"], stall["per_second"]) == group and stall["event"].startswith(event)
            ]
            if values:
                bars[x] = max(values)
        axes.bar(
            [x + (place - (len(series) - 1) / 2) * width for x in bars],
            list(bars.values()),
            width,
            color=EVENTS[event],
            alpha=1.0 if what == "moved" else 0.5,
            label=f"{event}, {what}",
        )
    axes.set_yscale("log")  # a killed member is missed for seconds
    names = [(profile.replace("-", "\n"), per_second) for profile, per_second in groups]
    axes.set_xticks(range(len(groups)), [f"{per_second:,} msg/s\n{profile}" for profile, per_second in names])
    axes.set_title("longest from producer to committed reader when members come and go, ms")
    figure.legend(frameon=False, ncols=3, loc="outside lower center")
    save(figure, path)


def soak(results: Results, path: Path) -> None:
    minutes = [second / 60 for second in range(len(results["rss_mb"]))]
    figure, axes = pyplot.subplots(figsize=(5.5, 2.4), layout="constrained")
    axes.plot(minutes, results["rss_mb"], color=OURS)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("minutes")
    axes.set_title(f"resident memory of a worker at {results['per_second']} msg/s, MB")
    save(figure, path)


def cycles(found: list[Results], path: Path) -> None:
    numbers = [one["number"] for one in found]
    figure, axes = pyplot.subplots(figsize=(5.5, 2.8), layout="constrained")
    for what, colour, title in (("heap", OURS, "table"), ("index", LIMIT, "index")):
        axes.plot(numbers, [one[what] / 1e6 for one in found], "o-", color=colour, label=title)
    axes.set_xticks(numbers)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("cycles, in each of which as many rows come as go")
    axes.legend(frameon=False)
    axes.set_title("size of the inbox, MB")
    save(figure, path)


def medians(found: list[Results], by: str, what: str) -> dict[Any, float]:
    values: dict[Any, list[float]] = defaultdict(list)
    for one in found:
        if one[what] is not None:
            values[one[by]].append(one[what])
    return {name: median(all_) for name, all_ in values.items()}


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(name) for name in sys.argv[2:]])
