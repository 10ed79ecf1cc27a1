"""What more than one command takes on its command line, and on whose behalf it acts."""

from __future__ import annotations

import getpass
import inspect
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from processor.errors import ProcessorError

ConfigFile = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG",
        envvar="PROCESSOR_CONFIG",
        help="TOML file of one deployment, such as config/orders.toml.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would change; change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


class WrongUse(ProcessorError):
    """The arguments contradict each other, or ask for something that does not exist."""

    exit_code = 2


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Lets commands share options: a parameter whose type is a dataclass takes one option for each of its fields."""
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    signature = inspect.signature(command, eval_str=True)
    for parameter in signature.parameters.values():
        if not is_dataclass(parameter.annotation):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        group: Any = parameter.annotation
        groups[parameter.name] = group
        hints = get_type_hints(group, include_extras=True)
        parameters += [
            inspect.Parameter(
                field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=hints[field.name]
            )
            for field in fields(group)
        ]

    @wraps(command)
    def with_options(**given: Any) -> None:
        for name, group in groups.items():
            given[name] = group(**{field.name: given.pop(field.name) for field in fields(group)})
        command(**given)

    with_options.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options


def require_terminal(action: str) -> None:
    """For a command that asks before it acts."""
    if not sys.stdin.isatty():
        raise WrongUse(f"no terminal to confirm on: give --yes to {action} without being asked")


def user() -> str:
    try:
        name = getpass.getuser()
    except (KeyError, OSError):  # a container's user may have no name
        name = str(os.getuid())
    return storable(f"{name}@{socket.gethostname()}")


def storable(text: str) -> str:
    """The text with ? for each byte of an argument that is not UTF-8: neither JSON nor Postgres could hold it."""
    return text.encode(errors="replace").decode()
