"""`processor run`."""

from __future__ import annotations

from typing import Annotated

import structlog
import typer

from processor.cli.arguments import ConfigFile
from processor.cli.deployment import load
from processor.errors import ProcessorError
from processor.observe import logs
from processor.service import run as service

log = structlog.get_logger()


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
    try:
        code = service.run(load(config_file), workers)
    except ProcessorError as error:
        if not logs.are_json():
            raise
        # A program that reads the log of a service can read no other form. At a level that is never left out.
        log.critical("ended", reason=str(error), exit_code=error.exit_code)
        raise typer.Exit(error.exit_code) from None
    raise typer.Exit(code)
