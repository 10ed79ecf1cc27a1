"""From `module:function` in the configuration to the function itself."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processor.errors import ConfigError


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


def _one_line(error: BaseException) -> str:
    """The exception in one line, with the place in the imported code that raised it."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if not frame.filename.startswith("<") and frame.filename not in (__file__, importlib.__file__):
            place = f" ({os.path.relpath(frame.filename)}, line {frame.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())}{place}"
