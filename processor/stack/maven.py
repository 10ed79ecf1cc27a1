"""Resolves Kafka from Maven coordinates with jgo's Python resolver; imported only when jars are missing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from jgo.maven import Artifact, Dependency, MavenContext, PythonResolver

from processor.stack.display import Display

TIMEOUT_SECONDS = 30
PARALLEL_DOWNLOADS = 8
MARK = ".incomplete"


def fetch(
    coordinates: tuple[str, ...],
    excluded: tuple[tuple[str, str], ...],
    repository: Path,
    mirror: str | None,
    display: Display,
) -> list[Path]:
    """The jars of these coordinates and of all they need, in a local repository that keeps what it has."""
    _remove_incomplete(repository)
    context = MavenContext(
        resolver=_MarkingResolver(display),
        repo_cache=repository,
        remote_repos={"mirror": mirror.rstrip("/")} if mirror else None,
        timeout=TIMEOUT_SECONDS,
    )
    display.begin("resolving Apache Kafka (only once)")
    dependencies = _resolve(context, coordinates, excluded)
    display.begin("downloading Apache Kafka (only once)", total=len(dependencies))
    with ThreadPoolExecutor(PARALLEL_DOWNLOADS) as pool:
        return list(pool.map(lambda dependency: _jar(dependency, display), dependencies))


def _resolve(
    context: MavenContext, coordinates: tuple[str, ...], excluded: tuple[tuple[str, str], ...]
) -> list[Dependency]:
    exclusions = [context.project(*module) for module in excluded]
    wanted = [context.create_dependency(coordinate, exclusions) for coordinate in coordinates]
    inputs, transitive = context.resolver.resolve(wanted)
    return [
        dependency
        for dependency in [*inputs, *transitive]
        if dependency.scope in (None, "compile", "runtime") and not dependency.optional
    ]


def _jar(dependency: Dependency, display: Display) -> Path:
    path: Path = dependency.artifact.resolve()
    display.file_done()
    return path


class _MarkingResolver(PythonResolver):
    """jgo writes a download straight to its final name; a mark beside it says it is not whole yet."""

    def __init__(self, display: Display) -> None:
        @contextmanager
        def received(_filename: str, _size: int) -> Iterator[Callable[[int], None]]:
            yield display.received

        super().__init__(progress_callback=received)

    def download(self, artifact: Artifact) -> Path | None:
        target = artifact.cached_path
        assert target is not None
        target.parent.mkdir(parents=True, exist_ok=True)
        mark = target.with_name(target.name + MARK)
        mark.touch()
        path = super().download(artifact)
        mark.unlink()
        return path


def _remove_incomplete(repository: Path) -> None:
    for mark in list(repository.rglob(f"*{MARK}")):
        mark.with_name(mark.name.removesuffix(MARK)).unlink(missing_ok=True)
        mark.unlink()
