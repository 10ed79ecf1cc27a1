"""`processor run`."""

from __future__ import annotations

from typing import Annotated

import typer

from processor.cli.arguments import ConfigFile
from processor.cli.deployment import load
from processor.service import run as service


def run(
    config_file: ConfigFile,
    workers: Annotated[
        int,
        typer.Option(min=1, envvar="PROCESSOR_WORKERS", help="Processes to run; partitions are shared among them."),
    ] = 1,
) -> None:
    """Consume the configured topics, run their handlers, publish their outputs.

    Runs until SIGTERM or SIGINT: the current batch is committed or, after
    run.stop_timeout_ms, rolled back. A batch that was rolled back is
    redelivered, not lost.
    """
    raise typer.Exit(service.run(load(config_file), workers) or 0)
