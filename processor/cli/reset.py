"""`processor reset`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from processor.cli.arguments import ConfigFile, DryRun, WrongUse, Yes, grouped, require_terminal, user
from processor.cli.deployment import load
from processor.cli.dlq.filters import moment
from processor.cli.output import Format, Output, print_json, print_line, print_table
from processor.cli.replay.options import partition_with_range
from processor.kafka.cluster import Cluster
from processor.messages.message import Partition
from processor.operations.replay import ranges
from processor.operations.replay import reset as operation
from processor.operations.replay.ranges import Facts
from processor.operations.replay.reset import Move
from processor.postgres import connections
from processor.settings.schema import Settings

TITLES = ("partition", "committed", "to", "change", "ledger")


@grouped
def reset(
    config_file: ConfigFile,
    *,
    earliest: Annotated[bool, typer.Option("--earliest", help="To where the log begins.")] = False,
    latest: Annotated[bool, typer.Option("--latest", help="To the last stable offset.")] = False,
    to: Annotated[int | None, typer.Option("--to", min=0, help="To this offset.")] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", help="To the first record of this time: ISO, or how long ago, such as 2h."),
    ] = None,
    partition: Annotated[
        list[str] | None, typer.Option("--partition", help="Only this one, as [TOPIC/]NUMBER; may be repeated.")
    ] = None,
    undo: Annotated[
        Path | None, typer.Option("--undo", metavar="FILE", help="Back to where a reset that wrote this file began.")
    ] = None,
    undo_file: Annotated[
        Path | None,
        typer.Option("--undo-file", metavar="FILE", help="Where to write the way back. Default: a file named by time."),
    ] = None,
    despite_forgotten: Annotated[
        bool, typer.Option("--despite-forgotten", help="Go below what retention has forgotten.")
    ] = False,
    dry_run: DryRun = False,
    yes: Yes = False,
    output: Output,
) -> None:
    """Move the offset from which the service goes on. The service has to be stopped.

    What is done is recognised and skipped; outputs that are stored and not
    sent go out with the next start. It writes a file with the way back.

    \b
    processor reset shop.toml --since 2h --dry-run
    processor reset shop.toml --partition 0 --to 4711 --yes
    """
    settings = load(config_file)
    if [earliest, latest, to is not None, since is not None, undo is not None].count(True) != 1:
        raise WrongUse("where to? Give one of --earliest, --latest, --to, --since and --undo")
    if not (dry_run or yes):
        require_terminal("move the offsets")

    async def act() -> tuple[list[Move], Path | None]:
        cluster = Cluster(settings.kafka, settings.consumer)
        try:
            async with connections.with_tables(settings) as db:
                await operation.require_idle(settings)
                document = _read(undo) if undo is not None else None
                chosen = operation.partitions_of(document) if undo else await _chosen(settings, cluster, partition)
                facts = await ranges.gather(db, settings.consumer, cluster, chosen)
                if undo is not None:
                    found = operation.undone(document, facts)
                else:
                    targets = await _targets(cluster, facts, chosen, to, since, earliest=earliest)
                    found = operation.moves(facts, targets, despite_forgotten=despite_forgotten)
                _show(found, output.format)
                if dry_run or not found:
                    return found, None
                if not yes:
                    typer.confirm("move them?", abort=True, err=True)
                path = undo_file or Path(f"{settings.consumer}-offsets-{datetime.now(UTC):%Y%m%d-%H%M%S}.json")
                _write(path, found)
                await operation.apply(db, settings, cluster, found, user())
                return found, path
        finally:
            cluster.close()

    found, path = asyncio.run(act())
    if output.format is Format.JSON:
        moved = [one.as_json() for one in found]
        print_json({"dry_run": dry_run, "moved": moved, "undo_file": None if path is None else str(path)})
    elif output.format is Format.TABLE:
        if not found:
            typer.echo("nothing to do: the offsets are there already")
        elif path is not None:
            typer.echo(f"{len(found)} partition(s) moved; the way back: processor reset {config_file} --undo {path}")


async def _chosen(settings: Settings, cluster: Cluster, given: Sequence[str] | None) -> list[Partition]:
    places = [partition_with_range(text, settings) for text in given or ()]
    if any(bounds != (None, None) for _, bounds in places):
        raise WrongUse("--partition takes no range here: give its number, and --to")
    return await ranges.chosen(settings, cluster, [at for at, _ in places] or None)


async def _targets(
    cluster: Cluster,
    facts: Facts,
    chosen: Sequence[Partition],
    to: int | None,
    since: str | None,
    *,
    earliest: bool,
) -> Mapping[Partition, int]:
    if to is not None:
        return dict.fromkeys(chosen, to)
    if since is not None:
        at = moment(since, datetime.now(UTC))
        found = await ranges.first_at(cluster, chosen, int(at.timestamp() * 1000), facts.stable)
        return {partition: min(offset, facts.stable[partition]) for partition, offset in found.items()}
    return {at: facts.logs[at].start if earliest else facts.stable[at] for at in chosen}


def _read(path: Path) -> Any:
    try:
        return orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise WrongUse(f"--undo {path}: cannot be read: {error}") from None


def _write(path: Path, found: Sequence[Move]) -> None:
    """Before anything is changed: without a way back nothing is."""
    try:
        with path.open("xb") as file:
            file.write(orjson.dumps({"moved": [one.as_json() for one in found]}, option=orjson.OPT_INDENT_2))
    except OSError as error:
        raise WrongUse(f"--undo-file {path}: cannot be written: {error.strerror}; nothing was moved") from None


def _show(found: Sequence[Move], form: Format) -> None:
    """Before the operator is asked."""
    if form is Format.JSONL:
        for one in found:
            print_line(one.as_json())
    elif form is Format.TABLE and found:
        print_table(TITLES, map(_cells, found), {})


def _cells(one: Move) -> tuple[str, ...]:
    change = "-" if one.before is None else f"{one.after - one.before:+}"
    return (str(one.partition), str(one.before), str(one.after), change, str(one.position))
