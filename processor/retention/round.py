"""A round through the inbox, like the hand of a clock: page after page, what may be forgotten goes.

The pages of a table are in the order in which they were first filled, and a freed page is filled again as a whole: what
expires together lies together, and reading the table once a round costs less than an index by time would cost each
claim. Each step is a short transaction of its own, and most of the time nothing is under way.
"""

from __future__ import annotations

import asyncio
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import orjson

from processor import failpoints
from processor.errors import BatchAborted
from processor.postgres import parked_keys, pruning, retention, sqlstates
from processor.postgres.pruning import Round
from processor.retention import archive
from processor.retention.archive import Archive
from processor.retention.survey import Found, Held, behind, survey

if TYPE_CHECKING:
    from processor.kafka.cluster import Cluster
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

T = TypeVar("T")

# A step should take this long: others may have to wait for it.
STEP_SECONDS = 0.015
# Bounds of the number of pages in a step. Full pages take a few times STEP_SECONDS at most, also when nothing had to go
# from those before.
FEWEST_PAGES, MOST_PAGES = 1, 32
# While the service is behind, this work gets so much less of the time.
YIELDING = 4
# How often to ask whether it is, also in its other processes.
ASK_SECONDS = 10.0


class _TakenOver(Exception):
    """Another process goes on with the round; this one's step is void."""


class _MovedBack(Exception):
    """An operator has moved offsets back since the survey; this step is void."""


@dataclass(frozen=True, slots=True)
class Done:
    """What a round, or the rest of one, has done."""

    found: Found
    deleted: int  # rows; in a dry run, those that would be
    pages: int
    seconds: float
    longest: float  # seconds of a step: somebody may have had to wait that long
    complete: bool  # False if it was interrupted, or another process goes on with it
    archived: str | None  # the file


class Hand:
    """One round, or the rest of one, on a connection that is used for nothing else meanwhile."""

    def __init__(
        self,
        settings: Settings,
        connection: Connection,
        cluster: Cluster,
        *,
        behind: Callable[[], bool] = lambda: False,
        stopped: Callable[[], bool] = lambda: False,
        moved: Callable[[int, int], None] = lambda done, pages: None,
        dry: bool = False,
    ) -> None:
        """`behind` says whether this process needs the time more; `moved` hears how many pages of how many are done."""
        self._settings = settings
        self._connection = connection
        self._cluster = cluster
        self._behind = behind
        self._stopped = stopped
        self._moved = moved
        self._dry = dry
        token = uuid.uuid4().hex[:8]
        self._round = Round(connection, settings.consumer, token)
        directory = settings.retention.archive
        self._archive = Archive(directory, settings.consumer, token) if directory is not None and not dry else None
        self._others_behind = False
        self._asked = -math.inf  # when the brokers were last asked for that
        self._raised = False  # the watermarks
        self._deleted = 0
        self._longest = 0.0

    async def go_round(self, *, resume: bool = False) -> Done | Held:
        """Go through all pages; with `resume`, on from where the last round was given up."""
        try:
            return await self._go_round(resume=resume)
        finally:
            if self._archive is not None:
                await asyncio.to_thread(self._archive.release)

    async def _go_round(self, *, resume: bool) -> Done | Held:
        started = time.monotonic()
        found = await survey(self._connection, self._settings, self._cluster, dry=self._dry)
        if isinstance(found, Held):
            return found
        first = 0 if self._dry else await self._begin(found, resume=resume)
        end = await pruning.pages(self._connection)
        page = first
        try:
            async for page in self._walk(found, first, end):
                self._moved(page - first, end - first)
            if page >= end and not self._dry:
                await self._round.finish(self._deleted)
        except _TakenOver:
            end = page + 1  # whatever is left of the round is another's
        except _MovedBack:
            return Held("an operator has moved offsets back, or begun a replay, just now")
        archived = await _on_disk(self._archive.close) if self._archive is not None else None
        return Done(
            found,
            self._deleted,
            page - first,
            time.monotonic() - started,
            self._longest,
            complete=page >= end,
            archived=archived,
        )

    async def _begin(self, found: Found, *, resume: bool) -> int:
        """Shut out the process before, and bring in order what it has left; return the first page."""
        consumer, directory = self._settings.consumer, self._settings.retention.archive
        await self._round.take()
        if directory is not None:
            names = await _on_disk(partial(archive.left_open, directory, consumer))
            counting = await pruning.archived(self._connection, names)
            await _on_disk(partial(archive.settle, directory, {name: counting.get(name, 0) for name in names}))
        await parked_keys.forget_repeats(self._connection, list(found.names))
        standing = await pruning.standing(self._connection, consumer)
        if resume and standing is not None and standing.under_way:
            return standing.page
        await self._round.begin()
        return 0

    async def _walk(self, found: Found, first: int, end: int) -> AsyncIterator[int]:
        """Yield the page that is reached with each step."""
        page, number = first, FEWEST_PAGES
        while page < end and not self._stopped():
            until = min(page + number, end)
            began = time.perf_counter()
            self._deleted += await self._step(found, page, until)
            seconds = time.perf_counter() - began
            self._longest = max(self._longest, seconds)
            page = until
            yield page
            number = next_size(number, seconds)
            await asyncio.sleep(pause(seconds, self._settings.retention.pace, behind=await self._yields()))

    async def _yields(self) -> bool:
        """Whether a process of the service needs the time more."""
        if time.monotonic() - self._asked > ASK_SECONDS:
            self._others_behind = await behind(self._connection, self._settings, self._cluster)
            self._asked = time.monotonic()
        return self._behind() or self._others_behind

    async def _step(self, found: Found, page: int, until: int) -> int:
        """Delete what may go from these pages, or count it; return how many rows that are."""
        if self._dry:
            return await pruning.count(self._connection, found.expired, page, until)
        try:
            async with self._connection.transaction(isolation="read_committed"):
                deleted, size = await self._forget(found, page, until)
                failpoints.reach("before_forgetting")
        except Exception as error:
            if sqlstates.is_lock_timeout(error):
                return 0  # somebody works on one of these rows: the next round comes by again
            raise
        failpoints.reach("after_forgetting")
        self._raised = self._raised or deleted > 0
        if self._archive is not None and deleted:
            self._archive.counts(size, deleted)
        return deleted

    async def _forget(self, found: Found, page: int, until: int) -> tuple[int, int]:
        """The open transaction: return how many rows it deletes, and how long the archive's file is with them."""
        if not await self._round.go_on(until, durable=self._archive is not None):
            raise _TakenOver
        rows: Sequence[tuple[int, str]] = ()
        if self._archive is None:
            deleted = await self._round.delete(found.expired, page, until)
        else:
            rows = await self._round.take_out(found.expired, page, until)
            deleted = len(rows)
        if not deleted:
            return 0, 0
        if not self._raised and not await retention.raise_watermarks(
            self._connection, self._settings.consumer, found.cutoff
        ):
            raise _MovedBack
        if self._archive is None:
            return deleted, 0
        lines = [self._line(found, *row) for row in rows]
        size = await _on_disk(partial(self._archive.append, lines))
        await self._round.note_archived(self._archive.name, size, self._archive.messages + deleted)
        return deleted, size

    def _line(self, found: Found, partition_id: int, row: str) -> str:
        """The row as Postgres writes it, behind the names that it does not have."""
        name = found.names[partition_id]
        named = {"consumer": self._settings.consumer, "topic": name.topic, "partition": name.number}
        return f"{orjson.dumps(named).decode()[:-1]},{row[1:]}"


async def _on_disk(work: Callable[[], T]) -> T:
    """Work on files, in a thread: a slow disk must not hold up the service."""
    try:
        return await asyncio.to_thread(work)
    except OSError as error:
        raise BatchAborted(f"retention.archive: {error}") from None


def next_size(pages: int, seconds: float) -> int:
    """How many pages the next step takes, after one of so many pages that took so long."""
    wanted = pages * STEP_SECONDS / max(seconds, STEP_SECONDS / 2)
    return min(max(int(wanted), FEWEST_PAGES), MOST_PAGES)


def pause(seconds: float, pace: int, *, behind: bool) -> float:
    """How long to wait after a step that took so long, for work to be this percentage of the time."""
    share = pace / 100 / (YIELDING if behind else 1)
    return seconds * (1 / share - 1)
