"""Records in Kafka that are about certain messages: deliveries in the input, outputs, dead letters. Read-only.

Kafka has no index for this, so stretches of the topics are read. How much is bounded, and what was not looked at is
said. An output names its cause in a header, and a dead letter the message that failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from processor.kafka.logs import Logs
from processor.kafka.scan import Scan
from processor.messages import identity
from processor.messages.decode import Decoder
from processor.messages.message import Headers, Partition, last_header
from processor.messages.outputs import CAUSATION_ID, MESSAGE_ID, REPLAY
from processor.messages.record import Reading
from processor.messages.types import MessageTypes

if TYPE_CHECKING:
    from processor.settings.schema import Settings

# How long before and after a moment that is known an output of it is looked for: clocks differ, and outputs may wait.
BEFORE, AFTER = timedelta(minutes=1), timedelta(minutes=5)

_OURS = re.compile(r"([0-9a-f]{32})-\d+")


@dataclass(frozen=True, slots=True)
class Sighting:
    """One record that is about a message."""

    message_id: str  # of the message, as the inbox has it
    partition: Partition
    offset: int
    at: datetime | None
    kind: str  # delivery, output or letter
    key: bytes | None
    checksum: int = 0
    redriven: bool = False
    notes: dict[str, str] = field(default_factory=dict)  # from headers

    @property
    def place(self) -> str:
        return f"{self.partition.topic}:{self.partition.number}:{self.offset}"


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of time; without an end, up to now."""

    begin: datetime
    end: datetime | None = None


def around(moments: Iterable[datetime], times: Iterable[tuple[datetime, datetime]] = ()) -> list[Span]:
    """The stretches around these moments, and what lasted from one time to another; those that touch made one."""
    spans: list[Span] = []
    for first, last in sorted([*((moment, moment) for moment in moments), *times]):
        before = spans[-1] if spans else None
        if before is not None and before.end is not None and first - BEFORE <= before.end:
            spans[-1] = Span(before.begin, max(before.end, last + AFTER))
        else:
            spans.append(Span(first - BEFORE, last + AFTER))
    return spans


class Search:
    """Reads topics and keeps what is about certain messages. All calls block. Close it."""

    def __init__(self, settings: Settings, limit: int) -> None:
        self._settings = settings
        self._limit = limit  # records of one topic
        self._logs = Logs(settings.kafka, settings.consumer)
        self._scan = Scan(settings.kafka, settings.consumer)
        self._decoder = Decoder(settings, MessageTypes({}))  # finds ids; what a handler wants to know does not matter
        self._topics: dict[str, tuple[str, list[int]]] = {}
        self.not_looked_at: list[str] = []

    def close(self) -> None:
        self._scan.close()
        self._logs.close()

    def topic_id(self, topic: str) -> str:
        """The id of a topic that was looked at."""
        return self._topics[topic][0]

    def delivery_at(self, partition: Partition, offset: int) -> Sighting | None:
        """Return the input record at these coordinates, or None if there is none (any more)."""
        self._meet([partition.topic])
        end = self._logs.ends([partition])[0].get(partition)
        if end is None or not end.start <= offset < end.stable:
            return None
        found, _, _ = self._read(partition, offset, offset + 1, self._delivery(lambda _: True), 1)
        return found[0] if found else None

    def deliveries(self, span: Span, ids: Collection[str] | None = None, key: bytes | None = None) -> list[Sighting]:
        """Return what came in with one of these ids, or with this key."""
        topics = self._settings.topics
        if ids is not None:
            return self._search(topics, [span], self._delivery(lambda one: one.message_id in ids))
        return self._search(topics, [span], self._delivery(lambda one: one.key == key, key=key))

    def outputs(self, topics: Collection[str], spans: Sequence[Span], ids: Collection[str]) -> list[Sighting]:
        """Return what was sent because of these messages, dead letters among it, as far as committed readers see it."""
        key_of = identity.inbox_key(self._settings.consumer)
        keys = {id_: key_of(id_).hex() for id_ in ids}
        consumer = self._settings.consumer

        def about(partition: Partition, message: Any) -> Sighting | None:
            headers = _headers(message)
            replay = {"replay": name} if (name := _text(last_header(headers, REPLAY))) else {}
            cause, letter_of = (_text(last_header(headers, name)) for name in (CAUSATION_ID, "dlq-message-id"))
            if letter_of in keys and _text(last_header(headers, "dlq-consumer")) == consumer:
                names = ("class", "reason", "error", "attempts")
                notes = {name: _text(last_header(headers, f"dlq-{name}")) or "" for name in names}
                notes = {name: text for name, text in notes.items() if text} | replay
                return _sighting(str(letter_of), partition, message, "letter", notes)
            if cause in keys and letter_of is None:
                own = _text(last_header(headers, MESSAGE_ID)) or ""
                ours = _OURS.fullmatch(own)
                if ours is None or ours[1] == keys[cause]:
                    type_ = _text(last_header(headers, "type"))
                    return _sighting(cause, partition, message, "output", ({"type": type_} if type_ else {}) | replay)
            return None

        return self._search(topics, spans, about)

    def _delivery(
        self, wanted: Callable[[Sighting], bool], key: bytes | None = None
    ) -> Callable[[Partition, Any], Sighting | None]:
        def about(partition: Partition, message: Any) -> Sighting | None:
            if key is not None and message.key() != key:
                return None
            reading = Reading(partition, 0, self._topics[partition.topic][0], epoch=0, ledger_id=0)
            ((record,),) = (span.rows() for span in self._decoder.decode_all([message], reading))
            found = _sighting(
                record.message.id,
                partition,
                message,
                "delivery",
                {},
                checksum=record.payload_hash,
                redriven=record.redriven,
            )
            return found if wanted(found) and not record.not_ours else None

        return about

    def _search(
        self, topics: Iterable[str], spans: Sequence[Span], about: Callable[[Partition, Any], Sighting | None]
    ) -> list[Sighting]:
        topics = list(dict.fromkeys(topics))
        self._meet(topics)
        found: list[Sighting] = []
        for topic in topics:
            if topic not in self._topics:
                self.not_looked_at.append(f"{topic}: it does not exist")
                continue
            left = self._limit
            partitions = [Partition(topic, number) for number in self._topics[topic][1]]
            for partition, start, end in self._stretches(partitions, spans):
                seen, count, position = self._read(partition, start, end, about, left)
                found += seen
                left -= count
                if position < end:
                    self.not_looked_at.append(f"{partition} from offset {position} to {end}: --scan-limit is reached")
            if spans and spans[-1].end is not None:
                self.not_looked_at.append(f"{topic} outside of {', '.join(map(_named, spans))}")
        return found

    def _stretches(self, partitions: Sequence[Partition], spans: Sequence[Span]) -> list[tuple[Partition, int, int]]:
        ends, unknown = self._logs.ends(partitions)
        self.not_looked_at += [f"{partition}: {why}" for partition, why in unknown.items()]
        stretches = []
        for span in spans:
            begins = self._logs.at_time(ends, _ms(span.begin))
            stops = {} if span.end is None else self._logs.at_time(ends, _ms(span.end))
            for partition, end in ends.items():
                start = max(begins.get(partition, end.start), end.start)
                stop = min(stops.get(partition, end.stable), end.stable)
                if start < stop:
                    stretches.append((partition, start, stop))
        return stretches

    def _read(
        self,
        partition: Partition,
        start: int,
        end: int,
        about: Callable[[Partition, Any], Sighting | None],
        limit: int,
    ) -> tuple[list[Sighting], int, int]:
        """Return what was found, how many records were read, `limit` at most, and up to where."""
        found: list[Sighting] = []
        count, position = 0, start
        if limit > 0:
            self._scan.begin(partition, start, end)
            while (messages := self._scan.more()) is not None:
                for message in messages:
                    if count == limit:
                        break
                    count += 1
                    position = int(message.offset() or 0) + 1
                    if (one := about(partition, message)) is not None:
                        found.append(one)
                if count == limit:
                    break
            else:
                position = end
        return found, count, position

    def _meet(self, topics: Iterable[str]) -> None:
        if new := set(topics) - self._topics.keys():
            self._topics |= self._logs.topics(new)


def _sighting(
    message_id: str,
    partition: Partition,
    message: Any,
    kind: str,
    notes: dict[str, str],
    *,
    checksum: int = 0,
    redriven: bool = False,
) -> Sighting:
    _, timestamp = message.timestamp()
    at = datetime.fromtimestamp(timestamp / 1000, UTC) if timestamp > 0 else None
    offset, key = int(message.offset() or 0), message.key()
    return Sighting(message_id, partition, offset, at, kind, key, checksum, redriven, notes)


def _headers(message: Any) -> Headers:
    try:
        return message.headers() or ()
    except Exception:  # a header's name is not UTF-8: it is none of ours
        return ()


def _text(value: bytes | None) -> str | None:
    return None if value is None else value.decode(errors="replace")


def _ms(at: datetime) -> int:
    return max(0, int(at.timestamp() * 1000))


def _named(span: Span) -> str:
    def time(at: datetime) -> str:
        return at.astimezone(UTC).isoformat(sep=" ", timespec="seconds").replace("+00:00", "Z")

    return f"{time(span.begin)} to {'now' if span.end is None else time(span.end)}"
