"""`processor stack`: the local Kafka and PostgreSQL from the command line."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from processor.stack.local import ServerStatus

NOT_ALL_RUNNING = 3

app = typer.Typer(
    name="stack",
    no_args_is_help=True,
    help="A real Kafka cluster and a real PostgreSQL on this machine, from pip packages alone.",
    epilog=(
        "Environment: PROCESSOR_STACK_DIR (folder for data and logs), PROCESSOR_STACK_CACHE (folder for "
        "Kafka's jars), PROCESSOR_STACK_MAVEN_URL (repository to download them from), PROCESSOR_STACK_KAFKA_VERSION "
        "(another version of Kafka), PROCESSOR_STACK_POSTGRES (folder of another PostgreSQL, such as "
        "/usr/lib/postgresql/15), JAVA_HOME (a Java of your own, 17 or newer). "
        "Exit status: 0 done, 1 failed, 2 wrong usage; `status` has its own."
    ),
)

Directory = Annotated[
    Path,
    typer.Option("--directory", "-d", envvar="PROCESSOR_STACK_DIR", help="Folder for data and logs."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing unless it fails.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]

DEFAULT_DIRECTORY = Path(".stack")


@app.command()
def up(
    directory: Directory = DEFAULT_DIRECTORY,
    brokers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of brokers; from 3 on with replication 3 and min ISR 2. Default: as before, or 1.",
            show_default=False,
        ),
    ] = None,
    sasl: Annotated[
        bool | None,
        typer.Option(
            "--sasl/--no-sasl",
            help="Clients log in with SCRAM-SHA-512. Default: as before, or no.",
            show_default=False,
        ),
    ] = None,
    tls: Annotated[
        bool | None,
        typer.Option(
            "--tls/--no-tls",
            help="Clients connect over TLS. Default: as before, or no.",
            show_default=False,
        ),
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Start what is not running, and wait until it serves clients.

    Keeps running after the command, and after Ctrl-C, until `processor stack down`. Listens on loopback
    only. The first run downloads Kafka's jars (46 MB); later runs need no network. After a crash, run it
    again: it starts what is missing with the data that is there.
    """
    from processor.stack import Stack
    from processor.stack.display import display

    stack = Stack(directory, brokers, sasl=sasl, tls=tls)
    with display(quiet=quiet) as progress:
        started = stack.up(display=progress)
    if not quiet:
        typer.echo("the stack is up" if started else "the stack was up already")
        typer.echo(f"  Kafka       {stack.bootstrap_servers}")
        typer.echo(f"  PostgreSQL  {stack.postgres_url}")
        typer.echo(f"  data, logs  {stack.directory}")
        typer.echo('point the processor at it: eval "$(processor stack env)"')


@app.command()
def down(
    directory: Directory = DEFAULT_DIRECTORY,
    purge: Annotated[bool, typer.Option("--purge", help="Delete the data and the logs as well.")] = False,
    quiet: Quiet = False,
) -> None:
    """Shut every server down: orderly, and by force if one does not end within seconds."""
    from processor.stack import Stack

    was_running = Stack(directory).down(purge=purge)
    if not quiet:
        typer.echo("the stack is down" if was_running else "nothing was running")
        if purge:
            typer.echo("its data and logs are deleted")


@app.command()
def status(directory: Directory = DEFAULT_DIRECTORY, as_json: AsJson = False) -> None:
    """Show every server: running, paused (held by SIGSTOP) or down.

    Exit status: 0 all are running, 3 at least one is not, or there is no stack in this folder.
    """
    from processor.stack import Stack

    stack = Stack(directory)
    servers = stack.status()
    all_running = _all_running(servers)
    if as_json:
        typer.echo(
            json.dumps(
                {
                    "directory": str(stack.directory),
                    "all_running": all_running,
                    "servers": [server.model_dump(mode="json") for server in servers],
                },
                indent=2,
            )
        )
    elif not servers:
        typer.echo(f"no stack in {stack.directory}: start one with `processor stack up`")
    else:
        _print_table([(s.name, s.state, str(s.pid or "-"), s.address or "-", str(s.log)) for s in servers])
    if not all_running:
        raise typer.Exit(NOT_ALL_RUNNING)


@app.command()
def env(directory: Directory = DEFAULT_DIRECTORY, as_json: AsJson = False) -> None:
    """Print the variables that point the processor at this stack, as shell `export` lines.

    Use it as: eval "$(processor stack env)"
    """
    from processor.stack import Stack

    stack = Stack(directory)
    variables = stack.environment()
    if not _all_running(stack.status()):
        typer.echo("not every server is running: start them with `processor stack up`", err=True)
    if as_json:
        typer.echo(json.dumps(variables, indent=2))
        return
    for name, value in variables.items():
        typer.echo(f"export {name}={shlex.quote(value)}")


def _all_running(servers: list[ServerStatus]) -> bool:
    return bool(servers) and all(server.state == "running" for server in servers)


def _print_table(rows: list[tuple[str, ...]]) -> None:
    console = Console()
    if not console.is_terminal:
        for row in rows:
            typer.echo("\t".join(row))
        return
    table = Table("server", "state", "pid", "address", "log")
    colours = {"running": "green", "paused": "yellow", "down": "red"}
    for name, state, *rest in rows:
        table.add_row(name, f"[{colours[state]}]{state}[/]", *rest)
    console.print(table)
