"""The story of a message, in order: what the inbox has kept of it, and the records in Kafka about it. Read-only.

The inbox knows where the message was first seen, how it failed, and what operators did. Kafka knows when it came again,
and what was sent because of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from processor.errors import SetupError
from processor.messages.message import Partition
from processor.operations import names
from processor.operations.sightings import Search, Sighting, Span, around
from processor.postgres import dead_letters, look_up, replays
from processor.postgres.dead_letters import Filter
from processor.postgres.look_up import Place, Wanted

if TYPE_CHECKING:
    from processor.postgres.replays import Progress
    from processor.postgres.session import Connection
    from processor.settings.schema import Settings

MARGIN = timedelta(minutes=1)
# Of one key; more would be a list and no story.
MESSAGES = 20
UNFINISHED = tuple(status for status in look_up.STATUSES if status != "completed")


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened to a message. What is not known is None."""

    at: datetime | None
    what: str
    place: str | None = None  # topic:partition:offset
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Story:
    id: str
    row: dict[str, Any] | None  # in the inbox
    events: list[Event]


@dataclass(slots=True)
class Told:
    stories: list[Story]
    not_looked_at: list[str]
    more: int = 0  # messages of the same key


@dataclass(slots=True)
class _Subject:
    id: str
    row: dict[str, Any] | None
    deliveries: list[Sighting] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Replayed:
    """A replay: when it was worked on, where it may have sent outputs, and what it is about."""

    begin: datetime
    end: datetime
    topic: str | None  # instead of those that handlers name
    ranges: Sequence[Progress]

    def went_over(self, places: Collection[tuple[Partition, int]]) -> bool:
        return any(
            one.partition == at and one.first <= offset < one.end for one in self.ranges for at, offset in places
        )


class Tracer:
    """Finds messages and tells their stories. `topics` are output topics beside those that handlers declare."""

    def __init__(self, db: Connection, settings: Settings, search: Search, topics: Sequence[str]) -> None:
        self._db = db
        self._settings = settings
        self._search = search
        declared = [topic for handler in settings.handlers.values() for topic in handler.outputs]
        letters = [topic for name in settings.topics if (topic := settings.dead_letter_topic(name))]
        self._topics = list(dict.fromkeys([*declared, *topics, *letters]))
        self._declared = bool(declared or topics)

    async def by_id(self, message_id: str, type_: str | None) -> Told:
        row = await names.shown(self._db, self._settings, message_id, type_)
        return await self._tell([_Subject(row["message_id"], row)])

    async def at(self, partition: Partition, offset: int) -> Told:
        delivery = await asyncio.to_thread(self._search.delivery_at, partition, offset)
        if delivery is not None:
            return await self._tell([await self._subject(delivery)])
        wanted = Filter(topic=partition.topic, partition=partition.number)
        partitions = await dead_letters.partitions(self._db, self._settings.consumer, wanted)
        ids = await look_up.at(self._db, partitions, offset)
        if not ids:
            raise SetupError(
                f"{partition} has no record at offset {offset} that committed readers see, and the inbox has no "
                "message from there that did not complete; a completed one is found by its id"
            )
        rows = await dead_letters.find(self._db, self._settings.consumer, ids)
        return await self._tell([_Subject(id_, row) for id_, row in rows.items()])

    async def by_key(self, key: bytes, since: datetime) -> Told:
        deliveries = await asyncio.to_thread(self._search.deliveries, Span(since), None, key)
        subjects: dict[str, _Subject] = {}
        for delivery in deliveries:
            if delivery.message_id not in subjects and len(subjects) <= MESSAGES:
                subjects[delivery.message_id] = await self._subject(delivery)
        partitions = await dead_letters.partitions(self._db, self._settings.consumer, Filter())
        wanted = Wanted(statuses=UNFINISHED, record_key=key)
        rows = await look_up.page(self._db, wanted, partitions, Place(), MESSAGES)
        ids = [row["message_id"] for row in rows if row["message_id"] is not None]
        for id_, row in (await dead_letters.find(self._db, self._settings.consumer, ids)).items():
            subjects.setdefault(id_, _Subject(id_, row))
        if not subjects:
            raise SetupError(
                f"no message with this key: since {since.isoformat(timespec='seconds')} none came in, and none is "
                "unfinished in the inbox; --since looks further back"
            )
        told = await self._tell(list(subjects.values())[:MESSAGES])
        told.more = max(0, len({*subjects, *(one.message_id for one in deliveries)}) - MESSAGES)
        return told

    async def _replays(self) -> list[_Replayed]:
        now = datetime.now(UTC)
        found = []
        for one in await replays.find(self._db, self._settings.consumer):
            times = [at for event in one.history if (at := _time(event.get("at"))) is not None]
            if times:
                end = now if one.state in replays.UNFINISHED else max(times)
                found.append(_Replayed(min(times), end, one.plan.get("output_topic"), one.ranges))
        return found

    async def _subject(self, delivery: Sighting) -> _Subject:
        """The message that a delivery is one of. A collision has a row of its own, under id and coordinates."""
        topic_id = self._search.topic_id(delivery.partition.topic)
        place = f"{delivery.partition.topic}:{topic_id}:{delivery.partition.number}:{delivery.offset}"
        own = f"{delivery.message_id}~{place}"
        rows = await dead_letters.find(self._db, self._settings.consumer, [delivery.message_id, own])
        id_ = own if own in rows else delivery.message_id
        return _Subject(id_, rows.get(id_), [delivery])

    async def _tell(self, subjects: list[_Subject]) -> Told:
        plain = {subject.id: _plain(subject) for subject in subjects}
        moments = [moment for subject in subjects for moment in _moments(subject)]
        ids = {*plain, *plain.values()}
        if moments:
            begin = min(moments) - MARGIN
            deliveries = await asyncio.to_thread(self._search.deliveries, Span(begin), ids)
            moments += [one.at for one in deliveries if one.at is not None]
            places = {place for one in subjects for place in _places(one)}
            again = [one for one in await self._replays() if one.went_over({*places, *map(_place, deliveries)})]
            spans = around(moments, [(one.begin, one.end) for one in again])
            topics = dict.fromkeys([*self._topics, *(one.topic for one in again if one.topic is not None)])
            sent = await asyncio.to_thread(self._search.outputs, topics, spans, ids)
        else:
            deliveries, sent = [], []
        if not self._declared:
            self._search.not_looked_at.append(
                "outputs: no handler declares its topics (`outputs` in [handlers]); name them with --output-topic"
            )
        stories = []
        for subject in subjects:
            names_ = {subject.id, plain[subject.id]}
            ours = [one for one in deliveries if one.message_id in names_]
            known = {one.place for one in ours}
            ours += [one for one in subject.deliveries if one.place not in known]
            events = [*_row_events(subject, ours), *_deliveries(subject, ours)]
            events += [_sent(one) for one in sent if one.message_id in names_]
            stories.append(Story(subject.id, subject.row, _ordered(events)))
        return Told(stories, list(dict.fromkeys(self._search.not_looked_at)))


def _plain(subject: _Subject) -> str:
    """The id that the message itself has: a row that shares it with another one has its coordinates behind it."""
    row = subject.row
    if row is not None and subject.id.endswith(f":{row['partition']}:{row['offset']}"):
        before, tilde, _ = subject.id.rpartition(f"~{row['topic']}:")
        return before if tilde else subject.id
    return subject.id


def _place(one: Sighting) -> tuple[Partition, int]:
    return one.partition, one.offset


def _places(subject: _Subject) -> list[tuple[Partition, int]]:
    """Where it is known to be in the input."""
    row = subject.row
    home = [] if row is None else [(Partition(row["topic"], row["partition"]), row["offset"])]
    return [*home, *map(_place, subject.deliveries)]


def _moments(subject: _Subject) -> list[datetime]:
    """When something is known to have happened to it."""
    found = [one.at for one in subject.deliveries if one.at is not None]
    if (row := subject.row) is not None:
        times = (row[name] for name in ("received_at", "first_failed_at", "finished_at", "redriven_at"))
        found += [at for at in (*times, *(_time(event.get("at")) for event in row["history"])) if at is not None]
    return found


def _row_events(subject: _Subject, deliveries: Sequence[Sighting]) -> list[Event]:
    """What the inbox knows. The events of its history are told by the names they have there, whatever they are."""
    row = subject.row
    if row is None:
        return []
    home = f"{row['topic']}:{row['partition']}"
    events = []
    if f"{home}:{row['offset']}" not in {one.place for one in deliveries}:
        events.append(Event(row["received_at"], "came in", f"{home}:{row['offset']}", {"kafka": "not seen there"}))
    for event in row["history"]:
        rest = {name: value for name, value in event.items() if name not in ("at", "event", "offset")}
        place = f"{home}:{event['offset']}" if "offset" in event else None
        events.append(Event(_time(event.get("at")), str(event.get("event")), place, rest))
    attempts = {"attempts": row["attempts"]}
    match row["status"]:
        case "completed":
            result = {} if row["result"] is None else {"result": row["result"]}
            events.append(Event(row["finished_at"] or row["received_at"], "completed", None, attempts | result))
        case "failed" if not row["history"]:
            events.append(Event(row["finished_at"], "failed", None, attempts | (row["error"] or {})))
        case "pending":
            error = row["error"] or {}
            why = {name: error[name] for name in ("class", "reason", "message") if error.get(name)}
            events.append(Event(None, "waits for its next try", None, attempts | why))
        case "processing":
            lease = {"owner": row["lease_owner"], "lease_until": row["lease_until"]}
            events.append(Event(None, "is being processed", None, attempts | lease))
        case "parked":
            events.append(Event(None, "waits behind a failed message of its key", None, {}))
    return events


def _deliveries(subject: _Subject, deliveries: Sequence[Sighting]) -> list[Event]:
    """Each time that it came in. What a redrive has sent is told by the history already."""
    row = subject.row
    home = (row["topic"], row["partition"], row["offset"]) if row is not None else None
    redriven = {event["offset"] for event in row["history"] if "offset" in event} if row is not None else set()
    ordered = sorted(deliveries, key=lambda one: (one.at is None, one.at, one.partition, one.offset))
    first = next((one for one in ordered if (*one.partition, one.offset) == home), ordered[0] if ordered else None)
    events = []
    for one in ordered:
        key = None if one.key is None else one.key.decode(errors="replace")
        if one is first:
            seen = {} if row is None else {"first_seen": row["received_at"]}
            events.append(Event(one.at, "came in", one.place, {"key": key, **seen}))
        elif one.redriven:
            if row is None or one.partition.number != row["partition"] or one.offset not in redriven:
                events.append(Event(one.at, "redriven", one.place, {"history": "not recorded"}))
        elif first is not None and one.checksum != first.checksum:
            events.append(Event(one.at, "collision", one.place, {"payload": "another than the first one's"}))
        else:
            events.append(Event(one.at, "duplicate", one.place, {}))
    return events


def _sent(one: Sighting) -> Event:
    what = "dead letter" if one.kind == "letter" else "output"
    return Event(one.at, what, one.place, dict(one.notes))


def _ordered(events: Sequence[Event]) -> list[Event]:
    """By time, what has none at the end. Kafka's times are in milliseconds: within one, what causes comes first."""

    def place(one: Event) -> tuple[Any, ...]:
        if one.at is None:
            return (True,)
        in_kafka = one.place is not None and "by" not in one.details
        return False, one.what != "came in", int(one.at.timestamp() * 1000), in_kafka, one.at

    return sorted(events, key=place)


def _time(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(str(text))
    except ValueError:
        return None
