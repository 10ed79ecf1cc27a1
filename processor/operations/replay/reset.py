"""Moves the offset from which the live service goes on, while it stands still.

Kafka's own tool can do that too, but knows neither the ledger nor what is stored. Here the offset's metadata says up to
where stored outputs are in Kafka, so that the next start sends the others, and none of these a second time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from processor.errors import Halt, SetupError
from processor.kafka.inspection import Inspection
from processor.kafka.inspection import Refused as NotAnswered
from processor.messages import positions
from processor.messages.message import Partition
from processor.operations.replay.plan import Refused
from processor.operations.replay.ranges import Facts
from processor.postgres import retention

if TYPE_CHECKING:
    from processor.kafka.cluster import Cluster
    from processor.messages.positions import CommittedOffset
    from processor.postgres.replays import Live
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

METADATA = "processor reset"


@dataclass(frozen=True, slots=True)
class Move:
    """What becomes of one partition's committed offset."""

    partition: Partition
    before: int | None
    before_metadata: str
    after: int
    after_metadata: str
    position: int | None  # of the ledger
    forgotten_below: int | None  # ids below are forgotten, and this goes below

    def as_json(self) -> dict[str, Any]:
        return {
            "topic": self.partition.topic,
            "partition": self.partition.number,
            "before": self.before,
            "before_metadata": self.before_metadata,
            "after": self.after,
            "after_metadata": self.after_metadata,
        }


async def require_idle(settings: Settings) -> None:
    """Raise Refused while the service is running."""
    try:
        group = await asyncio.to_thread(Inspection(settings.kafka).group, settings.consumer)
    except NotAnswered as problem:
        raise SetupError(f"kafka.bootstrap_servers: {problem}") from None
    if group is not None and group.number:
        raise Refused(f"{settings.consumer} is running: {group.number} member(s) in the group; stop the service first")


def moves(facts: Facts, targets: Mapping[Partition, int], *, despite_forgotten: bool) -> list[Move]:
    """What would be changed; raise Refused or Halt where that is not possible, or not safe."""
    found = []
    for partition, target in targets.items():
        log, stable, live = facts.logs[partition], facts.stable[partition], facts.live.get(partition)
        if not log.start <= target <= stable:
            raise Refused(f"{partition}: Kafka has the offsets {log.start}-{stable}: {target} is not among them")
        if live is not None and live.topic_id != log.topic_id:
            raise Halt(f"{partition}: the topic was deleted and created anew; see `processor topic-recreated`")
        at = facts.committed[partition]
        if at is not None and live is not None and target < at.offset and _is_behind(live, at):
            raise Halt(
                f"{partition}: the database is behind Kafka's committed offset, {live.position} of {at.offset}: it has "
                "lost commits, and moved like this they would be taken for new and sent twice; see `processor replay` "
                "for a restored database"
            )
        watermark = facts.watermarks.get(partition)
        below = watermark.below if watermark is not None and target < watermark.below else None
        if below is not None and not despite_forgotten:
            raise Halt(
                f"{partition}: ids of messages below offset {below} have been forgotten (retention): what is done "
                f"would be done again. Safe: {below}-{stable}. To do so all the same: --despite-forgotten"
            )
        if at is None or at.offset != target:
            found.append(
                Move(
                    partition,
                    None if at is None else at.offset,
                    "" if at is None else at.metadata,
                    target,
                    _metadata(at),
                    None if live is None else live.position,
                    below,
                )
            )
    return found


def undone(document: Any, facts: Facts) -> list[Move]:
    """The way back from what an undo file says; raise Refused if the offsets have moved since."""
    found = []
    for partition, one in _read(document).items():
        at = facts.committed.get(partition)
        if one["before"] is None:
            raise Refused(f"{partition}: had no committed offset: that cannot be brought back")
        if at is None or (at.offset, at.metadata) != (one["after"], one["after_metadata"]):
            raise Refused(f"{partition}: is not where that reset has put it: the service has run since")
        live = facts.live.get(partition)
        position = None if live is None else live.position
        back = one["before"], one["before_metadata"]
        found.append(Move(partition, at.offset, at.metadata, *back, position, None))
    return found


def partitions_of(document: Any) -> list[Partition]:
    """The partitions that an undo file is about."""
    return list(_read(document))


async def apply(connection: Connection, settings: Settings, cluster: Cluster, found: Sequence[Move], by: str) -> None:
    """Move the offsets. The brokers refuse if the service has been started meanwhile."""
    for one in found:
        if one.forgotten_below is not None:
            await retention.accept(connection, settings.consumer, one.partition, one.after, by)
    offsets = {one.partition: (one.after, one.after_metadata) for one in found}
    try:
        await asyncio.to_thread(cluster.move, offsets)
    except SetupError:
        for one in found:
            await retention.withdraw(connection, settings.consumer, one.partition)
        raise
    for one in found:  # an earlier reset may have accepted what is not wanted any more
        if one.forgotten_below is None:
            await retention.withdraw(connection, settings.consumer, one.partition)


def _is_behind(live: Live, at: CommittedOffset) -> bool:
    """Whether Kafka's offset, which moves after the database, is of work that the database does not have."""
    return at.ours and (at.epoch or 0) >= live.first_epoch and at.offset > live.position


def _metadata(at: CommittedOffset | None) -> str:
    """Not ours, so that the ledger follows; but what was published is remembered."""
    if at is None or at.epoch is None:
        return METADATA
    return positions.metadata(at.epoch, sent=at.offset if at.sent is None else at.sent)


def _read(document: Any) -> dict[Partition, dict[str, Any]]:
    try:
        return {Partition(one["topic"], one["partition"]): one for one in document["moved"]}
    except (KeyError, TypeError):
        raise Refused("not an undo file of `processor reset`") from None
