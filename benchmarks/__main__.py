"""`python -m benchmarks`: options, signals, exit codes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Annotated, NoReturn

import asyncpg
import typer
from confluent_kafka import KafkaException

from benchmarks import against as versions
from benchmarks import audit as audits
from benchmarks import distance as distances
from benchmarks import latency as latencies
from benchmarks import plots, report, suite, verdicts
from benchmarks import rebalance as rebalances
from benchmarks import replay as replays
from benchmarks import retention as retentions
from benchmarks import show as shows
from benchmarks import site as sites
from benchmarks import soak as soaking
from benchmarks.errors import BenchError
from benchmarks.growth import INBOX_ROWS, Growth
from benchmarks.measure import warm_up
from benchmarks.results import Results
from benchmarks.rivals import rivals
from benchmarks.show import Show
from benchmarks.site import Site
from benchmarks.subjects import BATCH, SUBJECTS
from processor.errors import ProcessorError
from processor.stack import Stack

# Two workers need this many for a steady rate: see verdicts.py.
RECORDS = 400_000
GROWTH_RECORDS = 300_000
PAIR_RECORDS = 200_000
QUICK_RECORDS = 30_000
FAR_RECORDS = 200_000
QUICK_SUBJECTS = ("bare", "batch", "batch-2", "collect")
AUDIT_RECORDS = 5_000_000
SECONDS = 8.0  # of steady load, for latency
QUICK_SECONDS = 2.0
PEERS_PYTHON = Path(".bench/bin/python")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Directory = Annotated[Path, typer.Option("--directory", "-d", help="Folder for the servers; deleted afterwards.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the results to this file.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a threshold is missed.")]
Plot = Annotated[Path | None, typer.Option("--plot", help="Also draw pictures into this folder.")]
Quick = Annotated[bool, typer.Option("--quick", help="A minute: few subjects, runs too short to judge, no limits.")]

DEFAULT_DIRECTORY = Path(".stack/bench")


class Interrupted(BaseException):
    """A signal asked us to stop. Raised once; further signals are ignored while the servers are taken down."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


@app.callback()
def main() -> None:
    """Measure the processor beside references and peers, on servers started for it alone."""


@app.command()
def run(
    records: Annotated[int, typer.Option(min=1000, help="Records for fast subjects; slow ones get a part.")] = RECORDS,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each subject.")] = 2,
    only: Annotated[list[str] | None, typer.Option(help="Only this subject; may be repeated.")] = None,
    ceilings: Annotated[bool, typer.Option(help="Also measure the limits of both servers.")] = True,
    with_latency: Annotated[bool, typer.Option("--latency/--no-latency", help="Also measure latency.")] = True,
    quick: Quick = False,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """Throughput of the processor beside the bare loop, with the limits of both servers.

    Exit status: 0 measured; 1 a run was wrong (something lost, doubled or not done), or, with --strict, a threshold
    was missed.
    """
    unknown = set(only or ()) - {subject.name for subject in SUBJECTS}
    if unknown:
        raise typer.BadParameter(f"no subject {', '.join(sorted(unknown))}", param_hint="--only")
    wanted = only or (QUICK_SUBJECTS if quick else [subject.name for subject in SUBJECTS])
    chosen = [subject for subject in SUBJECTS if subject.name in wanted]
    if quick:
        records, repeat, ceilings = min(records, QUICK_RECORDS), 1, False

    def work(site: Site, results: Results, show: Show) -> None:
        suite.throughput(site, results, chosen, records, repeat, show, with_ceilings=ceilings)
        if with_latency:
            seconds = QUICK_SECONDS if quick else SECONDS
            results.latencies = latencies.take_turns(site, seconds, min(repeat, 2), show, with_profiles=not quick)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command()
def latency(
    seconds: Annotated[float, typer.Option(min=1, help="Seconds that are measured, after a warm-up.")] = 20.0,
    repeat: Annotated[int, typer.Option(min=1, help="How often the bare loop and the processor alternate.")] = 3,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """Milliseconds from a producer to a committed reader: at 500 msg/s, and one message at a time."""

    def work(site: Site, results: Results, show: Show) -> None:
        results.latencies = latencies.take_turns(site, seconds, repeat, show, with_profiles=True)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command()
def growth(
    records: Annotated[int, typer.Option(min=1000, help="Records of each run.")] = GROWTH_RECORDS,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each point, each beside a base run.")] = 2,
    rows: Annotated[list[int] | None, typer.Option(help="Inbox rows, instead of 1, 10 and 30 million.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this axis: rows, partitions, sizes.")] = None,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """Throughput with a growing inbox, more partitions and larger messages; all three take an hour."""
    axes = ("rows", "partitions", "sizes")
    unknown = set(only or ()) - set(axes)
    if unknown:
        raise typer.BadParameter(f"no axis {', '.join(sorted(unknown))}: {', '.join(axes)}", param_hint="--only")

    def work(site: Site, results: Results, show: Show) -> None:
        growing = Growth(site, records, repeat, show)
        results.points = growing.points
        wanted = only or axes
        if "sizes" in wanted:
            growing.sizes()
        if "partitions" in wanted:
            growing.partitions()
        if "rows" in wanted:
            growing.inbox_rows(rows or INBOX_ROWS)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command()
def soak(
    minutes: Annotated[float, typer.Option(min=0.1, help="How long.")] = 20.0,
    per_second: Annotated[int, typer.Option("--rate", min=1, help="Messages per second.")] = 1000,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """The worker's memory under a steady load."""

    def work(site: Site, results: Results, show: Show) -> None:
        results.soak = soaking.soak(site, minutes, per_second, show)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command()
def retention(
    rows: Annotated[int, typer.Option(min=1000, help="Expired rows in the inbox.")] = retentions.ROWS,
    records: Annotated[int, typer.Option(min=1000, help="The backlog beside them.")] = retentions.RECORDS,
    pace: Annotated[int, typer.Option(min=1, max=100, help="retention.pace; under load a quarter of it.")] = 20,
    cycles: Annotated[int, typer.Option(min=0, help="Cycles whose sizes are shown.")] = retentions.CYCLES,
    cycle_rows: Annotated[int, typer.Option(min=1000, help="Rows that come and go in each.")] = retentions.CYCLE_ROWS,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """What retention costs a busy service, how long it makes it wait, and whether the inbox levels off."""

    def work(site: Site, results: Results, show: Show) -> None:
        results.retention = retentions.beside(site, rows, records, pace, show)
        if cycles:
            retentions.cycles(site, results.retention, cycles, cycle_rows, show)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command()
def audit(
    records: Annotated[
        int, typer.Option(min=1000, help="Messages of the input; there are as many outputs.")
    ] = AUDIT_RECORDS,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """Memory and rate of `processor verify`, which is interrupted once and goes on."""

    def work(site: Site, results: Results, show: Show) -> None:
        results.audit = audits.audit(site, records, show)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command()
def rebalance(
    rates: Annotated[list[int] | None, typer.Option("--rate", min=1, help="Messages per second, repeatable.")] = None,
    only: Annotated[list[str] | None, typer.Option(help=f"Only this: {', '.join(rebalances.NAMES)}.")] = None,
    churn: Annotated[
        int, typer.Option(min=0, help="Joins and leaves in a row; without --only, nothing else is measured.")
    ] = 0,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """How long outputs stand still when members of a group join, leave and die."""
    unknown = set(only or ()) - set(rebalances.NAMES)
    if unknown:
        raise typer.BadParameter(f"no {', '.join(sorted(unknown))}", param_hint="--only")
    names = only or ([] if churn else list(rebalances.NAMES))

    def work(site: Site, results: Results, show: Show) -> None:
        results.stalls += rebalances.take_turns(site, names, rates or list(rebalances.RATES), churn, show)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command()
def replay(
    records: Annotated[int, typer.Option(min=1000, help="Records that are done already.")] = 1_000_000,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of latency in each turn.")] = SECONDS,
    repeat: Annotated[int, typer.Option(min=1, help="Turns alone and beside a replay.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help=f"Only this: {', '.join(replays.NAMES)}.")] = None,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
) -> None:
    """How fast a replay passes what is done, what it costs the service beside it, and that kills change nothing."""
    unknown = set(only or ()) - set(replays.NAMES)
    if unknown:
        raise typer.BadParameter(f"no {', '.join(sorted(unknown))}", param_hint="--only")

    def work(site: Site, results: Results, show: Show) -> None:
        results.replays += replays.take_turns(site, only or list(replays.NAMES), records, seconds, repeat, show)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=None)


@app.command()
def distance(
    delays: Annotated[list[float] | None, typer.Option("--delay", min=0, help="Milliseconds, repeatable.")] = None,
    only: Annotated[list[str] | None, typer.Option(help="Only this subject; may be repeated.")] = None,
    records: Annotated[
        int, typer.Option(min=1000, help="Records for fast subjects; slow ones get a part.")
    ] = FAR_RECORDS,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each subject at each place.")] = 2,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """Handler forms when Postgres is 0, 1 and 5 ms away, with keys that repeat, beside the bare loop; 15 minutes.

    Near is without, and each delay with a proxy in between: what the proxy costs shows at 0 ms.
    """
    names = [subject.name for subject in distances.SUBJECTS]
    unknown = set(only or ()) - set(names)
    if unknown:
        raise typer.BadParameter(f"no subject {', '.join(sorted(unknown))}: {', '.join(names)}", param_hint="--only")
    chosen = [subject for subject in distances.SUBJECTS if subject.name in (only or names)]

    def work(site: Site, results: Results, show: Show) -> None:
        results.titles |= {subject.name: subject.title for subject in chosen}
        results.distances += distances.take_turns(site, chosen, delays or distances.DELAYS, records, repeat, show)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command()
def against(
    rev: Annotated[str, typer.Argument(help="Any revision of this repository: a branch, a tag, a commit, HEAD.")],
    pairs: Annotated[int, typer.Option(min=1, help="Pairs of runs for each subject.")] = 8,
    only: Annotated[list[str] | None, typer.Option(help=f"Only this: {', '.join(versions.SHARES)}.")] = None,
    records: Annotated[int, typer.Option(min=1000, help="Records of a run; slow subjects get a part.")] = PAIR_RECORDS,
    with_latency: Annotated[bool, typer.Option("--latency/--no-latency", help="Also latency at 500 msg/s.")] = True,
    seconds: Annotated[float, typer.Option(min=1, help="Seconds of latency that are measured in each run.")] = SECONDS,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """This working tree beside another version of the repository, in pairs of runs on the same servers.

    REV is checked out into a folder of its own and runs from there, uncommitted changes are part of this tree. Do not
    edit the tree meanwhile. A ratio above 1 is more of the unit: good for msg/s, bad for ms and µs.
    """
    unknown = set(only or ()) - versions.SHARES.keys()
    if unknown:
        raise typer.BadParameter(f"no subject {', '.join(sorted(unknown))}", param_hint="--only")
    try:
        revision = versions.find(rev)
    except BenchError as error:
        _fail(str(error))

    def work(site: Site, results: Results, show: Show) -> None:
        with versions.checked_out(revision, site.folder) as tree:
            results.comparisons += versions.throughput(
                site, tree, revision, only or versions.USUAL, records, pairs, show
            )
            if with_latency:
                results.comparisons += versions.latencies(site, tree, revision, seconds, pairs, show)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command()
def peers(
    records: Annotated[int, typer.Option(min=1000, help="Records at most; slow ones get fewer.")] = RECORDS,
    repeat: Annotated[int, typer.Option(min=1, help="Runs of each subject.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="Only this peer; may be repeated.")] = None,
    python: Annotated[Path, typer.Option(help="The Python of the peers' environment.")] = PEERS_PYTHON,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
    plot_to: Plot = None,
) -> None:
    """The processor beside other Python libraries at the same work."""
    try:
        chosen = [rival for rival in rivals(python) if not only or rival.name in only]
    except BenchError as error:
        _fail(str(error))

    def work(site: Site, results: Results, show: Show) -> None:
        suite.throughput(site, results, [BATCH, *chosen], records, repeat, show, with_ceilings=False)

    _measure(work, directory, as_json=as_json, out=out, strict=strict, plot_to=plot_to)


@app.command(name="show")
def show_(
    files: Annotated[list[Path], typer.Argument(help="Files written with --out.")],
    markdown: Annotated[bool, typer.Option("--markdown", help="As in docs/performance.md.")] = False,
) -> None:
    """Print the tables of results that were written to files; several files make one table."""
    report.show(Results.together(map(Results.read, files)), markdown=markdown)


@app.command()
def plot(
    results: Annotated[list[Path], typer.Argument(help="Files written with --out.")],
    to: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("docs/pictures"),
) -> None:
    """Draw pictures of results, with matplotlib from an environment of its own (`make bench-env`)."""
    try:
        plots.draw(results, to)
    except BenchError as error:
        _fail(str(error))


def _measure(
    work: Callable[[Site, Results, Show], None],
    directory: Path,
    *,
    as_json: bool,
    out: Path | None,
    strict: bool,
    plot_to: Path | None,
) -> None:
    """Start the servers, do the work, stop the servers, show the results. Nothing is left running, whatever happens."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    show = shows.suited(silent=as_json)
    try:
        stack = Stack(directory, overrides=sites.BROKER_SETTINGS)
        with sites.of_own(stack, quiet=as_json) as site:
            results = suite.begin(site)
            with show:
                show.step("warming up the servers")
                warm_up(site)
                work(site, results, show)
    except Interrupted as interrupted:
        print("interrupted: the servers are stopped, their data is deleted", file=sys.stderr)  # noqa: T201
        raise typer.Exit(interrupted.exit_code) from None
    except (BenchError, ProcessorError) as error:
        _fail(str(error))
    except KafkaException as error:
        _fail(f"Kafka: {error.args[0].str()}")
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        _fail(f"{type(error).__name__}: {error}")
    if out is not None:
        results.write(out)
    if plot_to is not None:
        _plot(results, plot_to)
    if as_json:
        typer.echo(json.dumps(report.as_json(results), indent=2))
    else:
        report.show(results)
    missed = strict and not all(verdict.ok for verdict in verdicts.verdicts(results))
    raise typer.Exit(1 if results.wrong or missed else 0)


def _plot(results: Results, to: Path) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        results.write(path)
        try:
            plots.draw([path], to)
        except BenchError as error:  # the figures are complete without pictures
            typer.echo(f"warning: {error}", err=True)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


def _fail(text: str) -> NoReturn:
    typer.echo(f"error: {' '.join(text.split())}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
