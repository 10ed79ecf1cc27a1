"""From names such as `module:function` in the configuration to what they name."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from processor.errors import ConfigError

if TYPE_CHECKING:
    from processor.settings.schema import Settings


def resolve(call: str) -> Callable[..., Any]:
    """Import the module and return its function; the working directory is searched first.

    An exception that the module raises while it is imported becomes one line: where it was raised, and its text.
    """
    module_name, _, function_name = call.partition(":")
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and f"{module_name}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{call}: no module {error.name!r} in {directory} or among the installed packages"
            ) from None
        raise ConfigError(f"{call}: importing {module_name} failed: {_one_line(error)}") from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{call}: importing {module_name} failed: {_one_line(error)}") from None
    function = getattr(module, function_name, None)
    if function is None:
        names = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
        near = difflib.get_close_matches(function_name, names, n=1)
        hint = f"; did you mean {module_name}:{near[0]}?" if near else ""
        raise ConfigError(f"{call}: {module_name} has no {function_name}{hint}")
    if not callable(function):
        raise ConfigError(f"{call}: is a {type(function).__name__}, not a function")
    return function  # type: ignore[no-any-return]  # narrowed by callable(), still Any to mypy


def error_classes(settings: Settings) -> dict[str, type[BaseException]]:
    """The exception classes that `failure.classes` names, by name; its other keys are SQLSTATEs."""
    where = f"{settings.source}: failure.classes"
    found: dict[str, type[BaseException]] = {}
    for name in settings.failure.classes:
        if ":" not in name:
            continue
        try:
            named: Any = resolve(name)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error}") from None
        if not (isinstance(named, type) and issubclass(named, BaseException)):
            raise ConfigError(f"{where}: {name} is no exception")
        found[name] = named
    return found


def _one_line(error: BaseException) -> str:
    """The exception in one line, with the place in the imported code that raised it."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith("<") and frame.filename not in (__file__, importlib.__file__):
            place = f" ({os.path.relpath(frame.filename)}, line {frame.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
