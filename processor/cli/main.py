"""The command `processor`: one verb each, text or JSON out, exit codes that mean something."""

from __future__ import annotations

import io
import os
import signal
import sys
from importlib.metadata import version
from typing import Annotated

import typer

from processor.cli.accept_rewind import accept_rewind
from processor.cli.check import check
from processor.cli.dlq.app import app as dlq_app
from processor.cli.inbox.app import app as inbox_app
from processor.cli.migrate import migrate
from processor.cli.prune import prune
from processor.cli.replay.app import app as replay_app
from processor.cli.reset import reset
from processor.cli.run import run
from processor.cli.status import status
from processor.cli.topic_recreated import topic_recreated
from processor.cli.trace import trace
from processor.cli.verify import verify
from processor.errors import ProcessorError
from processor.observe import logs
from processor.stack.cli import app as stack_app

EPILOG = (
    "Environment: PROCESSOR_CONFIG names the configuration file; every setting in it can be overridden, as in"
    " PROCESSOR_KAFKA__BOOTSTRAP_SERVERS or PROCESSOR_DATABASE__URL, and a secret read from a file, as in"
    " PROCESSOR_DATABASE__URL_FILE. PROCESSOR_LOG_LEVEL (debug, info, warning, error, critical) and"
    " PROCESSOR_LOG_FORMAT (auto, json, console) shape the log on stderr."
    "\n\nExit status: 0 done or stopped as asked, 1 gave up or a server is not as needed,"
    " 2 bad configuration or arguments, 3 halted: going on could lose or double something, an operator must decide,"
    " 5 an audit found something, 130 interrupted by Ctrl-C,"
    " 128 + n ended at once by signal n (143 by a second SIGTERM)."
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
app.add_typer(inbox_app, name="inbox")
app.add_typer(replay_app, name="replay")
app.command(epilog=EPILOG)(run)
app.command(epilog=EPILOG)(check)
app.command(epilog=EPILOG)(migrate)
app.command(epilog=EPILOG)(status)
app.command(epilog=EPILOG)(trace)
app.command(epilog=EPILOG)(prune)
app.command(epilog=EPILOG)(reset)
app.command("topic-recreated", epilog=EPILOG)(topic_recreated)
app.command("accept-rewind", epilog=EPILOG)(accept_rewind)
app.command(epilog=EPILOG)(verify)


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


def main() -> None:
    """Run the command line: an error of ours is lines and its exit code, only a bug is a traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without ✓ shows ? rather than a traceback
    # A script starts its background jobs with SIGINT ignored; one that is sent to a command all the same means it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
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
    """The reader of our output may have gone; Python would complain about that once more while it exits."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
