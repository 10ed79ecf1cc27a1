"""The command `processor`: one verb each, plain lines or JSON out, exit codes that mean something."""

from __future__ import annotations

import asyncio
import io
import os
import sys
from importlib.metadata import version
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console
from rich.text import Text

from processor.cli.arguments import ConfigFile, user
from processor.cli.deployment import load
from processor.cli.dlq import app as dlq_app
from processor.errors import ConfigError, ProcessorError
from processor.observe import logs
from processor.settings.schema import Settings
from processor.stack.cli import app as stack_app

EPILOG = (
    "Environment: PROCESSOR_CONFIG names the configuration file; every setting in it can be overridden, as in"
    " PROCESSOR_KAFKA__BOOTSTRAP_SERVERS or PROCESSOR_DATABASE__URL, and a secret read from a file, as in"
    " PROCESSOR_DATABASE__URL_FILE. PROCESSOR_LOG_LEVEL (debug, info, warning, error, critical) and"
    " PROCESSOR_LOG_FORMAT (auto, json, console) shape the log on stderr."
    "\n\nExit status: 0 done or stopped as asked, 1 gave up or a server is not as needed,"
    " 2 bad configuration, 3 halted: going on could lose or double something, an operator must decide."
)

app = typer.Typer(
    name="processor",
    help="Consume Kafka topics; apply each record to Postgres, and publish its outputs, exactly once.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(stack_app, name="stack")
app.add_typer(dlq_app, name="dlq")

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of lines.")]


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"processor {version('kafka-postgres-processor')}")
        raise typer.Exit


@app.callback()
def root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and stop."),
    ] = False,
) -> None:
    logs.configure()


@app.command(epilog=EPILOG)
def run(
    config_file: ConfigFile,
    workers: Annotated[
        int,
        typer.Option(min=1, envvar="PROCESSOR_WORKERS", help="Processes to run; partitions are shared among them."),
    ] = 1,
) -> None:
    """Consume the configured topics, run their handlers, publish their outputs.

    Runs until SIGTERM or SIGINT: the current batch is committed or, after run.stop_timeout_ms, rolled back;
    what was rolled back is redelivered, not lost.
    """
    settings = load(config_file)
    from processor.service import run

    raise typer.Exit(run.run(settings, workers) or 0)


@app.command(epilog=EPILOG)
def check(
    config_file: ConfigFile,
    connect: Annotated[
        bool,
        typer.Option("--connect", help="Also ask brokers and database: topics, permissions, schema. Changes nothing."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Validate a configuration, its handlers' imports included, without side effects.

    Secrets are never shown. Exit status 2 if the configuration is wrong, 1 if a server is not as needed.
    """
    from processor.operations import check as checks

    described: dict[str, Any] | None = None
    try:
        settings = load(config_file)
    except ConfigError as error:
        if not as_json:
            raise
        findings = [checks.Finding("configuration", str(config_file), False, line) for line in str(error).splitlines()]
    else:
        described = settings.describe()
        findings = checks.offline(settings)
        if connect and checks.exit_code(findings) == 0:
            findings += checks.connected(settings)
    code = checks.exit_code(findings)
    if as_json:
        _print_json({"ok": code == 0, "checks": findings, "settings": described})
    else:
        _print_findings(findings)
    raise typer.Exit(code)


@app.command(epilog=EPILOG)
def migrate(
    config_file: ConfigFile,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be applied; change nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Bring the database to the schema this release and its handlers need.

    Applies the numbered SQL files that are missing, each in one transaction, and records them. May be run by
    many processes at once and again at any time. A file that fails leaves nothing behind; those before it stay.
    """
    from processor.postgres import migrate as migrations

    files: list[dict[str, Any]] = []

    def tell(one: migrations.Migration | migrations.Applied) -> None:
        files.append({"set": one.set_name, "version": one.version, "name": one.name})
        if not as_json:
            word = "would apply" if dry_run else "applied"
            typer.echo(f"{word} {one.set_name}/{one.version:04}_{one.name}")

    async def act(settings: Settings) -> None:
        sets = migrations.sets(settings)
        async with migrations.connected(settings) as connection:
            if dry_run:
                for pending in (await migrations.status(connection, sets)).pending:
                    tell(pending)
            else:
                await migrations.apply(connection, sets, tell)

    try:
        asyncio.run(act(load(config_file)))
    except ProcessorError:
        if as_json and files:
            _print_json({"dry_run": dry_run, "applied": files})
        raise
    if as_json:
        _print_json({"dry_run": dry_run, "pending" if dry_run else "applied": files})
    elif not files:
        typer.echo("nothing to apply: the database is as this code needs it")


@app.command("topic-recreated", epilog=EPILOG)
def topic_recreated(
    config_file: ConfigFile,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change; change nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say that input topics were deleted and created anew: the service is to read them from their beginning.

    It halts when it finds one, for its offsets mean other records now. What failed or is parked of the old topic
    stays where it is, see `processor dlq`; of a parked key, messages of the new topic do not wait for the old ones.
    Outputs that may not have been sent are sent. Completed messages stay completed: one that comes again under the same
    id is a duplicate.
    """
    from processor.kafka.cluster import Cluster
    from processor.operations import dead_letters, topic_recreated

    settings = load(config_file)
    if not (dry_run or yes or sys.stdin.isatty()):
        raise dead_letters.WrongUse("nobody is there to confirm: give --yes to begin anew without being asked")

    async def act() -> tuple[list[topic_recreated.Recreated], int]:
        cluster = Cluster(settings.kafka, settings.consumer)
        try:
            async with dead_letters.opened(settings) as db:
                found = await topic_recreated.find(db, settings.consumer, cluster.topics(settings.topics))
                if not as_json:
                    for one in found:
                        _print_recreated(one)
                if dry_run or not found:
                    return found, 0
                if not yes:
                    typer.confirm("begin with the new one?", abort=True, err=True)
                return found, await topic_recreated.begin_anew(db, settings.consumer, found, cluster, user())
        finally:
            cluster.close()

    found, changed = asyncio.run(act())
    if as_json:
        _print_json({"dry_run": dry_run, "topics": found, "partitions_changed": changed})
    elif not found:
        typer.echo("nothing to do: every topic is the one that was read before")
    elif not dry_run:
        typer.echo(f"{changed} partition(s) begin anew; start the service again if it has stopped")


def _print_recreated(one: Any) -> None:
    typer.echo(f"{one.name}: was {one.known_id}, is {one.id} now")
    typer.echo(f"  {len(one.partitions)} partition(s) would begin at the start of the new topic")
    if one.left:
        left = ", ".join(f"{count} {status}" for status, count in sorted(one.left.items()))
        typer.echo(f"  messages of the old one that are not done: {left}; `processor dlq` goes on showing them")
    if one.lost:
        typer.echo(f"  {one.lost} of them were being tried for the first time: nothing but their ids is kept")
    if one.unsent:
        typer.echo(f"  outputs of {one.unsent} batch(es) are not known to be sent: the service sends them first")


def main() -> None:
    """Run the command line: an error of ours is one line and its exit code, only a bug is a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ shows ? rather than a traceback
    try:
        app(prog_name="processor")
    except ProcessorError as error:
        for line in str(error).splitlines():
            typer.echo(f"error: {line}", err=True)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        _flush()


def _flush() -> None:
    """Whoever read us may have gone; Python would complain about it once more while it exits."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_findings(findings: list[Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    marks = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "dim")}
    for finding in findings:
        mark, style = marks[finding.ok]
        separator = "" if finding.ok is False else f"{finding.name}: "
        console.print(Text.assemble((mark, style), f" {separator}{finding.text}"))


def _print_json(value: Any) -> None:
    typer.echo(orjson.dumps(value, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS).decode())
