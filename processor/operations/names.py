"""Messages by the ids that their producers gave them.

In the inbox, `message.scope_by_type` puts the type before an id and `message.window_seconds` the window behind it:
`TransferRequested:A2@1740787200`. An operator may name a message by either. The id as the inbox has it comes first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from processor.errors import SetupError
from processor.postgres import dead_letters
from processor.postgres.dead_letters import STATUSES, Filter

if TYPE_CHECKING:
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

# In an error; an id may be in any number of windows.
SHOWN = 10


async def all_named(db: Connection, settings: Settings, wanted: Filter) -> Filter:
    """The filter with the ids that the inbox has; one that may stand for several messages stands for all of them."""
    found = await _unfinished(db, settings, wanted)
    return replace(wanted, ids=tuple(id_ for given in wanted.ids for id_ in found.get(given) or [given]))


async def each_named(db: Connection, settings: Settings, wanted: Filter) -> Filter:
    """The same before something is done to them: an id that may stand for several messages is refused."""
    found = await _unfinished(db, settings, wanted)
    return replace(wanted, ids=tuple(_the_one(settings, given, found.get(given) or [given]) for given in wanted.ids))


async def shown(db: Connection, settings: Settings, message_id: str, type_: str | None) -> dict[str, Any]:
    """Everything that the inbox has about one message, whatever its status."""
    ids = candidates(settings, message_id, type_)
    wanted = Filter(ids=(message_id,), type=type_, statuses=STATUSES)
    unfinished = await _unfinished(db, settings, wanted)
    rows = await dead_letters.find(db, settings.consumer, [*ids, *unfinished.get(message_id, ())])
    # A plainly completed row has no type of its own.
    rows = {id_: row for id_, row in rows.items() if type_ is None or row["type"] in (None, type_)}
    if not rows:
        raise SetupError(_missing(settings, message_id, type_, ids))
    return rows[message_id if message_id in rows else _the_one(settings, message_id, rows)]


async def _unfinished(db: Connection, settings: Settings, wanted: Filter) -> dict[str, list[str]]:
    """What each id may stand for among the messages that the filter's other conditions leave."""
    scoped, windowed = settings.message.scope_by_type, settings.message.window_seconds is not None
    if not wanted.ids or not (scoped or windowed):
        return {}
    partitions = await dead_letters.partitions(db, settings.consumer, wanted)
    found = await dead_letters.named(db, settings.consumer, wanted, partitions, scoped=scoped, windowed=windowed)
    return {given: [given] if given in ids else ids for given, ids in found.items()}


def candidates(settings: Settings, message_id: str, type_: str | None) -> list[str]:
    """What the id may be in the inbox as far as the configuration tells, without its window."""
    if not settings.message.scope_by_type:
        return [message_id]
    types = [type_] if type_ is not None else ["" if name == "*" else name for name in settings.handlers]
    return [message_id, *(f"{name}:{message_id}" for name in types)]


def _the_one(settings: Settings, given: str, ids: Iterable[str]) -> str:
    first, *others = sorted(ids)
    if others:
        several = ", ".join(map(repr, [first, *others][:SHOWN])) + (", …" if len(others) >= SHOWN else "")
        how = "give one of these, or --type" if settings.message.scope_by_type else "give one of these"
        raise SetupError(f"{settings.consumer} has {len(others) + 1} messages with the id {given!r}: {several}; {how}")
    return first


def _missing(settings: Settings, message_id: str, type_: str | None, ids: list[str]) -> str:
    of_type = f" of type {type_!r}" if type_ is not None else ""
    text = f"{settings.consumer} has no message {message_id!r}{of_type} in its inbox"
    if len(ids) > 1:
        text += f", also not as {' or '.join(map(repr, ids[1:]))}"
    text += "; `processor dlq list` shows the ids"
    if settings.message.scope_by_type and type_ is None and "*" in settings.handlers:
        text += "; for a type that [handlers] does not name, give --type"
    if (window := settings.message.window_seconds) is not None:
        scope = f"{type_ or 'TYPE'}:" if settings.message.scope_by_type else ""
        text += (
            f"; give that of a completed message as {scope}{message_id}@N, where N is the time of its record in seconds"
            f" since 1970, rounded down to a multiple of message.window_seconds = {window}"
        )
    return text
