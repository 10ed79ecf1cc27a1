"""`processor verify`."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from processor.cli.arguments import ConfigFile, WrongUse, grouped
from processor.cli.deployment import load
from processor.cli.dlq.filters import moment
from processor.cli.output import Format, Output, counted, print_json, print_line, print_table, safe
from processor.cli.progress import Display, display
from processor.cli.signals import stopped_by_signals
from processor.operations.verify import audit, state
from processor.operations.verify.audit import Report
from processor.operations.verify.findings import MEANING, Finding
from processor.operations.verify.plan import Wanted
from processor.postgres import connections

FOUND = 5  # the exit code of an audit that has findings
TITLES = ("finding", "place", "id", "why")
COLOURS = dict.fromkeys(MEANING, "red")

WORDS = {
    "completed": "completed",
    "duplicate": "duplicates",
    "redriven": "redriven and completed",
    "failed": "failed",
    "parked": "parked",
    "discarded": "discarded",
    "in_retry": "tried again after a failure",
    "forgotten": "forgotten by retention",
    "without_inbox": "of types without inbox",
    "skipped_collision": "skipped as collisions",
    "for_another_consumer": "redriven for another consumer",
    "with_origin": "with one origin",
    "dead_letters": "dead letters",
    "of_others": "not of this consumer",
    "origin_unknown": "of a message that is no longer there",
}


@dataclass(frozen=True, slots=True)
class Range:
    """The options that say what is audited."""

    topic: Annotated[str | None, typer.Option("--topic", help="Only this input topic.")] = None
    partition: Annotated[int | None, typer.Option("--partition", min=0, help="Only this input partition.")] = None
    from_offset: Annotated[
        int | None, typer.Option("--from", min=0, metavar="OFFSET", help="Input from this offset on.")
    ] = None
    to_offset: Annotated[
        int | None, typer.Option("--to", min=0, metavar="OFFSET", help="Input before this offset.")
    ] = None
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="Input and outputs from this time on, by the records' timestamps: ISO (UTC unless it names a zone),"
            " or how long ago, such as 2h.",
        ),
    ] = None
    until: Annotated[str | None, typer.Option("--until", help="Input before this time.")] = None
    output_topics: Annotated[
        list[str] | None,
        typer.Option("--output-topic", help="An output topic that no handler declares; may be repeated."),
    ] = None
    sole_writer: Annotated[
        bool,
        typer.Option(
            "--sole-writer",
            help="Nobody else writes to the output topics: what this consumer did not send there is a finding.",
        ),
    ] = False

    def wanted(self) -> Wanted:
        now = datetime.now(UTC)
        if self.from_offset is not None and self.to_offset is not None and self.from_offset >= self.to_offset:
            raise WrongUse("--from and --to leave nothing between them")
        return Wanted(
            self.topic,
            self.partition,
            self.from_offset,
            self.to_offset,
            moment(self.since, now) if self.since else None,
            moment(self.until, now) if self.until else None,
            (self.since, self.until),
            tuple(self.output_topics or ()),
            self.sole_writer,
        )


@grouped
def verify(
    config_file: ConfigFile,
    range_: Range,
    *,
    state_folder: Annotated[
        Path | None,
        typer.Option(
            "--state",
            metavar="DIR",
            help="Keep there how far it is: the same command goes on after Ctrl-C or a crash. Needs some 60 bytes for"
            " each output.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Name at most this many findings; all are counted.")] = 100,
    output: Output,
) -> None:
    """Prove from the topics and the inbox that no message was lost and no output doubled; changes nothing.

    It reads the input up to the committed offsets, and the outputs that
    committed readers see, shares no code with the engine, and may run beside
    the service. Exit status 5 if it finds something.

    Examples:

        processor verify shop.toml --state /var/tmp/audit

        processor verify shop.toml --since 24h -o json
    """
    wanted = range_.wanted()
    settings = load(config_file)

    async def act() -> Report:
        quiet = output.format is not Format.TABLE
        with stopped_by_signals() as stop, state.folder(state_folder) as where, display("read", quiet=quiet) as shown:
            async with connections.with_tables(settings) as db:
                watcher = Watcher(shown)
                return await audit.run(db, settings, wanted, where=where, limit=limit, stop=stop, watcher=watcher)

    report = asyncio.run(act())
    match output.format:
        case Format.JSON:
            print_json(_as_json(report) | {"findings": [finding._asdict() for finding in _shown(report)]})
        case Format.JSONL:
            for finding in _shown(report):
                print_line(finding._asdict())
            print_line(_as_json(report))
        case Format.TABLE:
            _print(report, state_folder)
    if report.interrupted:
        raise typer.Exit(130)
    if not report.ok:
        raise typer.Exit(FOUND)


class Watcher:
    """Shows how an audit proceeds."""

    def __init__(self, display: Display) -> None:
        self._display = display
        self._total = 0

    def begin(self, total: int) -> None:
        self._total = total
        self._display.begin(total)

    def read(self, done: int, total: int) -> None:
        self._display.done(done, total)

    def comparing(self) -> None:
        self._display.waiting("comparing outputs")


def _shown(report: Report) -> Sequence[Finding]:
    return report.progress.findings.shown


def _as_json(report: Report) -> dict[str, Any]:
    progress = report.progress
    spans = progress.plan.spans
    return {
        "ok": report.ok and not report.interrupted,
        "interrupted": report.interrupted,
        "resumed": report.resumed,
        "seconds": round(report.seconds, 1),
        "input": progress.inputs,
        "outputs": progress.outputs,
        "found": progress.findings.counts,
        "not_shown": progress.findings.total - len(progress.findings.shown),
        "notes": _notes(report),
        "read": [
            {
                "topic": span.topic,
                "partition": span.partition,
                "is": "input" if span.is_input else "output",
                "from": span.start,
                "to": span.end,
                "position": span.position,
            }
            for span in spans
        ],
    }


def _notes(report: Report) -> list[str]:
    plan = report.progress.plan
    expired = [
        f"{span.at}: {span.expired} offsets expired before they were read" for span in plan.spans if span.expired
    ]
    return [*plan.notes, *expired]


def _print(report: Report, state_folder: Path | None) -> None:
    progress = report.progress
    findings = progress.findings
    if report.interrupted:
        rest = "the same command goes on" if state_folder else "with --state DIR, the same command would go on"
        typer.echo(f"interrupted: {progress.done} of {progress.total} offsets read; {rest}", err=True)
    for name, counts in (("input", progress.inputs), ("outputs", progress.outputs)):
        topics = {span.topic for span in progress.plan.spans if span.is_input is (name == "input")}
        if topics:
            what = ", ".join(_worded(counts)) or "nothing"
            typer.echo(f"{name}: {counts['records']} records of {', '.join(sorted(topics))}: {what}")
    for note in _notes(report):
        typer.echo(f"note: {safe(note)}")
    if findings.shown:
        print_table(TITLES, map(_cells, findings.shown), COLOURS)
        for kind, number in sorted(findings.counts.items()):
            typer.echo(f"{kind}: {number}: {MEANING[kind]}")
    if findings.total > len(findings.shown):
        typer.echo(f"{findings.total - len(findings.shown)} more are not named: raise --limit", err=True)
    if not report.interrupted:
        typer.echo(counted(findings.total, "finding") if findings.total else "clean")


def _worded(counts: Counter[str]) -> Iterator[str]:
    for name, words in WORDS.items():
        if counts[name]:
            yield f"{counts[name]} {words}"


def _cells(finding: Finding) -> tuple[str, ...]:
    offset = "" if finding.offset is None else f":{finding.offset}"
    return (
        finding.kind,
        f"{finding.topic}:{finding.partition}{offset}",
        safe(finding.id or "-"),
        safe(finding.why),
    )
