"""What more than one command takes on its command line, and on whose behalf it acts."""

from __future__ import annotations

import getpass
import os
import socket
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


def user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        name = str(os.getuid())
    return f"{name}@{socket.gethostname()}".encode(
        errors="replace"
    ).decode()  # a name that is no UTF-8 can be kept nowhere
