"""`processor replay`: records gone over again, beside the service."""

from __future__ import annotations

import typer

from processor.cli.replay.cancel import cancel
from processor.cli.replay.list import list_
from processor.cli.replay.pause import pause
from processor.cli.replay.resume import resume
from processor.cli.replay.show import show
from processor.cli.replay.start import start

EPILOG = (
    "Environment: PROCESSOR_CONFIG names the configuration file; PROCESSOR_LOG_LEVEL=info shows the engine's log."
    "\n\nExit status: 0 done or stopped as asked, 1 a server is not as needed, or messages failed, 2 wrong usage, bad"
    " configuration, or a range that Kafka does not have, 3 going on could lose or double something, 130 interrupted."
)

app = typer.Typer(
    name="replay",
    no_args_is_help=True,
    help="Go over records of the input again: process what is missing, send outputs again, or process all anew.",
    epilog=EPILOG,
)
app.command(epilog=EPILOG)(start)
app.command("list", epilog=EPILOG)(list_)
app.command(epilog=EPILOG)(show)
app.command(epilog=EPILOG)(pause)
app.command(epilog=EPILOG)(resume)
app.command(epilog=EPILOG)(cancel)
