"""The options that say what a replay is to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated

import typer

from processor.cli.arguments import WrongUse, storable
from processor.cli.dlq.filters import moment
from processor.messages.message import Partition
from processor.operations.replay.plan import Mode, Plan, Wanted
from processor.operations.replay.ranges import Bounds
from processor.settings.schema import Settings

_PARTITION = re.compile(r"(?:(?P<topic>[A-Za-z0-9._-]+)/)?(?P<number>\d+)(?::(?P<first>\d*)-(?P<end>\d*))?")

Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the replay, see `processor replay list`.")]
Rate = Annotated[float | None, typer.Option("--rate", min=0.001, help="Records per second, at most.")]
Reason = Annotated[str | None, typer.Option("--reason", help="Why; is kept with who and when.")]


@dataclass(frozen=True, slots=True)
class RangeOptions:
    all_: Annotated[bool, typer.Option("--all", help="Everything that Kafka has.")] = False
    partition: Annotated[
        list[str] | None,
        typer.Option(
            "--partition",
            help="Only this one, as [TOPIC/]NUMBER[:FROM-TO], such as 0:100-200, where 200 is not included;"
            " may be repeated.",
        ),
    ] = None
    from_: Annotated[int | None, typer.Option("--from", min=0, help="From this offset of each partition on.")] = None
    to: Annotated[int | None, typer.Option("--to", min=0, help="Up to this offset, which is not included.")] = None
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            help="From the first record of this time on: ISO (UTC unless it names a zone), or how long ago, such as"
            " 2h.",
        ),
    ] = None
    until: Annotated[str | None, typer.Option("--until", help="Up to the first record of this time.")] = None
    clip: Annotated[bool, typer.Option("--clip", help="Take what Kafka has of the range, and be content.")] = False

    def bounds(self, settings: Settings) -> Bounds:
        partitions = dict(partition_with_range(text, settings) for text in self.partition or ())
        whole = all(given == (None, None) for given in partitions.values())
        limits = (self.from_, self.to, self.since, self.until)
        if self.all_ and (limits != (None,) * 4 or not whole):
            raise WrongUse("--all is for all that Kafka has: leave it out, or the ranges")
        if not self.all_ and limits == (None,) * 4 and (whole or not partitions):
            raise WrongUse("which records? Give a range, such as --since 2h or --partition 0:100-200, or --all")
        if not whole and limits != (None,) * 4:
            raise WrongUse("a --partition with offsets of its own does not go with --from, --to, --since or --until")
        if (self.from_ is not None and self.since) or (self.to is not None and self.until):
            raise WrongUse("give either offsets or times, not both for the same end")
        now = datetime.now(UTC)
        return Bounds(
            partitions=(dict.fromkeys(partitions, (self.from_, self.to)) if whole else partitions) or None,
            first=self.from_,
            end=self.to,
            since=moment(self.since, now) if self.since else None,
            until=moment(self.until, now) if self.until else None,
            clip=self.clip,
        )


@dataclass(frozen=True, slots=True)
class PlanOptions:
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="missing: process what is not done. re-emit: send the outputs of what is done again. re-apply: process"
            " all again, under a --scope. dry-run: change nothing, and compare the outputs with those that were sent.",
        ),
    ] = Mode.MISSING
    name: Annotated[
        str | None,
        typer.Option("--name", help="Name of the replay. Default: its mode and the time.", show_default=False),
    ] = None
    key: Annotated[list[str] | None, typer.Option("--key", help="Only records with this key; may be repeated.")] = None
    type_: Annotated[list[str] | None, typer.Option("--type", help="Only messages of this type; may be repeated.")] = (
        None
    )
    ids: Annotated[list[str] | None, typer.Option("--id", help="Only the message with this id; may be repeated.")] = (
        None
    )
    rate: Rate = None
    scope: Annotated[
        str | None, typer.Option("--scope", help="For re-apply: each message is done once in this scope.")
    ] = None
    no_outputs: Annotated[bool, typer.Option("--no-outputs", help="For re-apply: send nothing.")] = False
    output_topic: Annotated[
        str | None, typer.Option("--output-topic", help="For re-apply: send all outputs to this topic instead.")
    ] = None
    despite_forgotten: Annotated[
        bool,
        typer.Option(
            "--despite-forgotten", help="Go below the offset up to which retention has forgotten what is done."
        ),
    ] = False

    def plan(self, settings: Settings) -> Plan:
        """The plan, still without its ranges."""
        name = self.name or f"{self.mode}-{datetime.now(UTC):%Y%m%d-%H%M%S}"
        for option, given in (("--name", name), ("--scope", self.scope)):
            if given is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,60}", given):
                raise WrongUse(f"{option} {given}: must be 1 to 60 of the characters A-Z a-z 0-9 . _ -")
        return Plan(
            consumer=settings.consumer,
            name=name,
            mode=self.mode,
            ranges=(),
            wanted=Wanted(
                tuple(key.encode(errors="surrogateescape") for key in self.key or ()),
                tuple(map(storable, self.type_ or ())),
                tuple(map(storable, self.ids or ())),
            ),
            scope=self.scope,
            outputs=not self.no_outputs,
            output_topic=self.output_topic,
            rate=self.rate,
            despite_forgotten=self.despite_forgotten,
        )


def partition_with_range(text: str, settings: Settings) -> tuple[Partition, tuple[int | None, int | None]]:
    """Read [TOPIC/]NUMBER[:FROM-TO]."""
    found = _PARTITION.fullmatch(text)
    if found is None:
        raise WrongUse(f"--partition {text}: give [TOPIC/]NUMBER[:FROM-TO], such as 0 or 0:100-200")
    topic = found["topic"] or settings.topics[0]
    if found["topic"] is None and len(settings.topics) > 1:
        raise WrongUse(f"--partition {text}: of which topic? Give it as {topic}/{text}")
    first, end = (int(bound) if bound else None for bound in (found["first"], found["end"]))
    return Partition(topic, int(found["number"])), (first, end)
