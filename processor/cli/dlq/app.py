"""`processor dlq`: messages that failed, and messages that wait behind them."""

from __future__ import annotations

import typer

from processor.cli.dlq.discard import discard
from processor.cli.dlq.list import list_
from processor.cli.dlq.redrive import redrive
from processor.cli.dlq.show import show

EPILOG = (
    "Environment: PROCESSOR_CONFIG names the configuration file."
    "\n\nExit status: 0 done, 1 a server is not as needed, there is no such message, or a message failed again,"
    " 2 wrong usage or bad configuration, 130 interrupted."
)

app = typer.Typer(
    name="dlq",
    no_args_is_help=True,
    help="Messages that failed or are parked: list them, look at one, send them once more, or give them up.",
    epilog=EPILOG,
)
app.command("list", epilog=EPILOG)(list_)
app.command(epilog=EPILOG)(show)
app.command(epilog=EPILOG)(redrive)
app.command(epilog=EPILOG)(discard)
