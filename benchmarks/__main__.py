"""`python -m benchmarks`: options, signals, exit codes."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Annotated

import asyncpg
import typer
from confluent_kafka import KafkaException

from benchmarks import report, suite, verdicts
from benchmarks import show as shows
from benchmarks import site as sites
from benchmarks.errors import BenchError
from benchmarks.results import Results
from benchmarks.show import Show
from benchmarks.site import Site
from benchmarks.subjects import SUBJECTS
from processor.errors import ProcessorError
from processor.stack import Stack

RECORDS = 200_000
QUICK_RECORDS = 30_000

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

Directory = Annotated[Path, typer.Option("--directory", "-d", help="Folder for the servers; deleted afterwards.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print only the results, as JSON.")]
Out = Annotated[Path | None, typer.Option("--out", help="Also write the results to this file.")]
Strict = Annotated[bool, typer.Option("--strict", help="Exit with 1 if a threshold is missed.")]
Quick = Annotated[bool, typer.Option("--quick", help="A look in less than a minute: figures are rough.")]

DEFAULT_DIRECTORY = Path(".stack/bench")


class Interrupted(BaseException):
    """A signal asked us to leave; raised once, further ones wait until everything is put away."""

    def __init__(self, number: int) -> None:
        self.exit_code = 128 + number


@app.callback()
def main() -> None:
    """Measure the processor beside references and peers, on servers started for it alone."""


@app.command()
def run(
    records: Annotated[int, typer.Option(min=1000, help="Records for the fast ones; slow ones get a part.")] = RECORDS,
    repeat: Annotated[int, typer.Option(min=1, help="How often everybody takes a turn.")] = 3,
    only: Annotated[list[str] | None, typer.Option(help="Only this subject; may be repeated.")] = None,
    ceilings: Annotated[bool, typer.Option(help="Also measure the limits of both servers.")] = True,
    quick: Quick = False,
    directory: Directory = DEFAULT_DIRECTORY,
    as_json: AsJson = False,
    out: Out = None,
    strict: Strict = False,
) -> None:
    """Throughput of the processor beside the bare loop, with the limits of both servers.

    Exit status: 0 measured; 1 a run was wrong (something lost, doubled or not done), or, with --strict, a threshold
    was missed.
    """
    unknown = set(only or ()) - {subject.name for subject in SUBJECTS}
    if unknown:
        raise typer.BadParameter(f"no subject {', '.join(sorted(unknown))}", param_hint="--only")
    chosen = [subject for subject in SUBJECTS if not only or subject.name in only]
    if quick:
        records, repeat = min(records, QUICK_RECORDS), 1

    def work(site: Site, results: Results, show: Show) -> None:
        suite.throughput(site, results, chosen, records, repeat, show, with_ceilings=ceilings)

    _measure(work, directory, as_json=as_json, out=out, strict=strict)


def _measure(
    work: Callable[[Site, Results, Show], None],
    directory: Path,
    *,
    as_json: bool,
    out: Path | None,
    strict: bool,
) -> None:
    """Servers up, work, servers down, results shown; whatever happens, nothing is left running."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    show = shows.suited(silent=as_json)
    try:
        stack = Stack(directory, overrides=sites.BROKER_SETTINGS)
        with sites.of_own(stack, quiet=as_json) as site:
            results = suite.begin(site)
            with show:
                work(site, results, show)
    except Interrupted as interrupted:
        print("interrupted: everything is put away", file=sys.stderr)  # noqa: T201
        raise typer.Exit(interrupted.exit_code) from None
    except (BenchError, ProcessorError) as error:
        _fail(str(error))
    except KafkaException as error:
        _fail(f"Kafka: {error.args[0].str()}")
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError) as error:
        _fail(f"{type(error).__name__}: {error}")
    if out is not None:
        results.write(out)
    if as_json:
        typer.echo(json.dumps(report.as_json(results), indent=2))
    else:
        report.show(results)
    missed = strict and not all(verdict.ok for verdict in verdicts.verdicts(results))
    raise typer.Exit(1 if results.wrong or missed else 0)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise Interrupted(number)


def _fail(text: str) -> None:
    typer.echo(f"error: {' '.join(text.split())}", err=True)
    raise typer.Exit(1)


if __name__ == "__main__":
    app()
