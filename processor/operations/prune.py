"""`processor prune`: one round of retention now, by the same hand as the service's, at a pace of its own.

The lock that elects a member of the service is asked for here too, so that two never go round at once: the command
waits until the service's round is over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from processor.errors import ConfigError, SetupError
from processor.postgres import connections, pruning
from processor.retention.round import Done, Hand
from processor.retention.survey import Held

if TYPE_CHECKING:
    from processor.kafka.cluster import Cluster
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

# How often to ask whether the service's round is over.
POLL_SECONDS = 0.5


async def run(
    settings: Settings,
    cluster: Cluster,
    *,
    dry_run: bool,
    stop: asyncio.Event,
    waiting: Callable[[], None],
    moved: Callable[[int, int], None],
) -> Done | None:
    """Go round once; None if it was stopped before it could begin. `waiting` is called when another one goes round."""
    if settings.retention.span is None:
        raise ConfigError(f"{settings.source}: retention.days: is 0, so the inbox keeps everything")
    async with connections.with_tables(settings) as connection:
        if not dry_run and not await _elected(connection, settings.consumer, stop, waiting):
            return None
        hand = Hand(settings, connection, cluster, stopped=stop.is_set, moved=moved, dry=dry_run)
        outcome = await hand.go_round()
    if isinstance(outcome, Held):
        raise SetupError(f"nothing may be forgotten now: {outcome.reason}")
    return outcome


async def _elected(connection: Connection, consumer: str, stop: asyncio.Event, waiting: Callable[[], None]) -> bool:
    """Wait until nobody else goes round; False if stopped meanwhile."""
    told = False
    while not await pruning.elect(connection, consumer):
        if not told:
            waiting()
            told = True
        try:
            await asyncio.wait_for(stop.wait(), POLL_SECONDS)
        except TimeoutError:
            continue
        return False
    return True
