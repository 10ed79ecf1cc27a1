"""Retention beside a running service: one member of the group at a time goes round, whichever is first.

A round begins when the last one began long enough ago, and goes on where it was given up. Nothing here is needed for
the service to go on: what goes wrong is reported, and tried again later.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from processor.observe.events import RetentionFailed, RetentionHeld, RetentionPruned, RetentionSlow
from processor.postgres import pruning
from processor.retention.round import Done, Hand
from processor.retention.survey import Held

if TYPE_CHECKING:
    from processor.kafka.cluster import Cluster
    from processor.observe.events import Emit
    from processor.postgres.session import Connection, Session
    from processor.settings.schema import Settings

# By then a service that starts has its partitions, or at least a position in each.
FIRST_SECONDS = 5.0
# How often to look, at most and at least, whether a round is due. After something went wrong, not so soon.
SHORTEST_SECONDS, LONGEST_SECONDS = 1.0, 60.0


class Retention:
    def __init__(
        self, settings: Settings, session: Session, cluster: Cluster, behind: Callable[[], bool], emit: Emit
    ) -> None:
        self._settings = settings
        self._session = session
        self._cluster = cluster
        self._behind = behind
        self._emit = emit
        self._held: str | None = None  # the reason that was reported last

    async def keep_going(self) -> None:
        """Go round whenever it is time and nobody else does. Runs until it is cancelled."""
        wait = FIRST_SECONDS
        while True:
            await asyncio.sleep(wait)
            try:
                async with self._session.use() as connection:
                    wait = await self._look(connection)
            except Exception as error:  # whatever it is, the service can do without
                self._emit(RetentionFailed(str(error) or type(error).__name__))
                await self._session.drop()  # and with the connection the lock
                wait = LONGEST_SECONDS
            wait = min(max(wait, SHORTEST_SECONDS), LONGEST_SECONDS)

    async def _look(self, connection: Connection) -> float:
        """Go round if it is time; return after how many seconds to look again."""
        if (wait := await self._due_in(connection)) > 0:
            return wait
        if not await pruning.elect(connection, self._settings.consumer):
            return LONGEST_SECONDS
        if await self._due_in(connection) <= 0:  # nobody else has been round meanwhile
            hand = Hand(self._settings, connection, self._cluster, behind=self._behind)
            self._report(await hand.go_round(resume=True))
        await pruning.resign(connection, self._settings.consumer)
        return await self._due_in(connection) or LONGEST_SECONDS

    async def _due_in(self, connection: Connection) -> float:
        standing = await pruning.standing(connection, self._settings.consumer)
        if standing is None or standing.under_way:
            return 0.0
        return max(0.0, self._settings.retention.period.total_seconds() - standing.seconds)

    def _report(self, outcome: Done | Held) -> None:
        if isinstance(outcome, Held):
            if outcome.reason != self._held:
                self._emit(RetentionHeld(outcome.reason))
            self._held = outcome.reason
            return
        self._held = None
        self._emit(
            RetentionPruned(
                outcome.deleted,
                outcome.found.cutoff.isoformat(timespec="seconds"),
                outcome.pages,
                round(outcome.seconds, 3),
                outcome.archived,
            )
        )
        if outcome.seconds > (period := self._settings.retention.period.total_seconds()):
            self._emit(RetentionSlow(round(outcome.seconds, 3), period))
