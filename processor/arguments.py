"""What more than one command takes on its command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        envvar="PROCESSOR_CONFIG",
        help="TOML file of one deployment, such as config/orders.toml.",
    ),
]
