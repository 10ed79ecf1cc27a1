"""Kafka's jars: downloaded once into a cache of the user, then used without network.

The cache is complete when its manifest is there, which is written last; it is believed while every jar
still has the size and checksum noted in it. Anything else is repaired by downloading what is missing.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import platformdirs
from pydantic import BaseModel, ValidationError

from processor.errors import SetupError
from processor.stack.display import Display
from processor.stack.process import one_line

VERSION_VARIABLE = "PROCESSOR_STACK_KAFKA_VERSION"
KAFKA_VERSION = os.environ.get(VERSION_VARIABLE) or "4.3.1"
COORDINATES = (
    f"org.apache.kafka:kafka_2.13:{KAFKA_VERSION}",
    f"org.apache.kafka:kafka-tools:{KAFKA_VERSION}",
    # The mark "!" keeps this one from managing the versions of the others: log4j's own parent
    # pins a kafka-clients of another major version.
    "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4!",
)
EXCLUDED = (
    ("org.apache.kafka", "connect-runtime"),  # a web server and forty more jars, for commands we do not run
    ("org.slf4j", "slf4j-log4j12"),  # of 3.x; another module has its name now, and log4j is bound above
)
MIRROR_VARIABLE = "PROCESSOR_STACK_MAVEN_URL"
CACHE_VARIABLE = "PROCESSOR_STACK_CACHE"


class Jar(BaseModel, frozen=True):
    path: str
    size: int
    sha256: str


class Manifest(BaseModel, frozen=True):
    coordinates: tuple[str, ...]
    jars: tuple[Jar, ...]


def cache_folder(fallback: Path) -> Path:
    """The user's cache folder, or `fallback` where that cannot be written."""
    chosen = os.environ.get(CACHE_VARIABLE)
    base = Path(chosen) if chosen else platformdirs.user_cache_path("kafka-postgres-processor")
    preferred = base.absolute() / f"kafka-{KAFKA_VERSION}"
    for folder in (preferred, fallback):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise SetupError(f"cannot write Kafka's jars to {preferred} or {fallback}: make one of them writable")


def classpath(cache: Path, display: Display) -> list[Path]:
    """Every jar the broker and its tools need, downloaded if this cache does not have them yet."""
    found = _from_manifest(cache)
    if found is not None:
        return found
    with locked(cache):
        # Whoever held the lock before us may have done the work.
        return _from_manifest(cache) or _download(cache, display)


@contextmanager
def locked(cache: Path) -> Iterator[None]:
    """One at a time fills the cache; the others wait and find it done."""
    with (cache / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _from_manifest(cache: Path) -> list[Path] | None:
    try:
        manifest = Manifest.model_validate_json((cache / "manifest.json").read_bytes())
    except (OSError, ValidationError):
        return None
    if manifest.coordinates != COORDINATES:
        return None
    damaged = [jar for jar in manifest.jars if not _is_whole(cache / jar.path, jar)]
    for jar in damaged:
        (cache / jar.path).unlink(missing_ok=True)
    return None if damaged else [cache / jar.path for jar in manifest.jars]


def _is_whole(path: Path, jar: Jar) -> bool:
    try:
        return path.stat().st_size == jar.size and _sha256(path) == jar.sha256
    except OSError:
        return False


def _download(cache: Path, display: Display) -> list[Path]:
    from processor.stack import maven

    repository = cache / "repository"
    try:
        paths = maven.fetch(COORDINATES, EXCLUDED, repository, os.environ.get(MIRROR_VARIABLE), display)
    except (OSError, RuntimeError) as error:
        # Among them every network error. What arrived whole is kept for the next attempt.
        raise SetupError(
            f"cannot download Apache Kafka {KAFKA_VERSION}: {one_line(str(error))}: check the network, "
            f"or set {MIRROR_VARIABLE} to a Maven repository you can reach, and try again"
        ) from error
    except Exception as error:
        # Something answered that is no Maven repository, and we cannot tell which files it spoiled.
        shutil.rmtree(repository, ignore_errors=True)
        raise SetupError(f"the Maven repository sent nonsense: {one_line(str(error))}: try again") from error
    for path in paths:
        if not zipfile.is_zipfile(path):
            path.unlink()
            raise SetupError(f"{path.name} arrived damaged: try again")
    jars = tuple(
        Jar(path=str(path.relative_to(cache)), size=path.stat().st_size, sha256=_sha256(path)) for path in paths
    )
    partial = cache / "manifest.partial"
    partial.write_text(Manifest(coordinates=COORDINATES, jars=jars).model_dump_json(indent=1))
    partial.replace(cache / "manifest.json")
    return paths


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
