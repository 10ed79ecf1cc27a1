"""`processor inbox`: what the inbox has, whatever became of it."""

from __future__ import annotations

import typer

from processor.cli.inbox.list import list_
from processor.cli.inbox.show import show

EPILOG = (
    "Environment: PROCESSOR_CONFIG names the configuration file."
    "\n\nExit status: 0 done, 1 a server is not as needed, the search took too long, or there is no such message,"
    " 2 wrong usage or bad configuration, 130 interrupted."
)

app = typer.Typer(
    name="inbox",
    no_args_is_help=True,
    help="Messages in the inbox, whatever became of them: list them, look at one. Changes nothing.",
    epilog=EPILOG,
)
app.command("list", epilog=EPILOG)(list_)
app.command(epilog=EPILOG)(show)
