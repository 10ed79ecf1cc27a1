"""Turns bytes and headers into records; a record that cannot be decoded has a `Failure` that keeps the evidence.

Runs on the poll thread, so that batch N+1 is decoded while Postgres works on batch N. Pure, and it never raises:
whatever a producer sends, and whatever a model's own validators do with it, ends as a message with an outcome.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any, cast

from processor.errors import text_of
from processor.messages import identity
from processor.messages.batch import ColumnSpan, RowSpan, Span
from processor.messages.failure import Failure
from processor.messages.formats.json import BadValue
from processor.messages.incoming import (
    TIMESTAMP_NOT_AVAILABLE,
    Incoming,
    RawColumns,
    RawRecord,
    checksum_of,
    size_of,
)
from processor.messages.message import Message, place
from processor.messages.record import Reading, Record

if TYPE_CHECKING:
    from processor.messages.types import MessageType, MessageTypes
    from processor.settings.schema import Settings

# A btree entry holds about 2700 bytes; an id near that size is a mistake in the producer.
MAX_ID_CHARS = 512

# The inbox appends the place in Kafka to an id that several rows share; this leaves room for the longest topic name.
MAX_STORED_ID_CHARS = 2 * MAX_ID_CHARS

# The header of a message that an operator sends again: the consumer it is for, a colon, its id in the inbox.
REDRIVE = "processor-redrive"

# A chunk with an unusual record is cut into pieces of these sizes, so that the other pieces stay in columns.
PIECES = (100, 20)


class Decoder:
    def __init__(self, settings: Settings, types: MessageTypes, scope: str | None = None) -> None:
        scope = settings.consumer if scope is None else scope  # of the keys in the inbox
        message = settings.message
        self._type_chain = identity.compile_chain(message.type)
        self._id_chain = identity.compile_chain(message.id)
        self._redrive_id = identity.compile_chain([f"header:{REDRIVE}"])
        self._id_names = ", ".join(message.id)
        self._consumer = settings.consumer
        self._scope = identity.scope(message)
        self._key = identity.inbox_key(scope)
        self._keys = identity.inbox_keys(scope)
        self._max_bytes = message.max_bytes
        self._types = types

    def decode_all(self, raws: Sequence[RawRecord], reading: Reading) -> list[Span]:
        """Decode each record as `decode` does; those without anything unusual come as columns."""
        return self._decode(raws, reading) if raws else []

    def _decode(self, raws: Sequence[RawRecord], reading: Reading) -> list[Span]:
        """Decode the records together, or else in smaller and smaller pieces, or else one by one."""
        together = self._decode_usual(raws, reading)
        if together is not None:
            return [together]
        size = next((size for size in PIECES if size < len(raws)), None)
        if size is None:
            alone = [self.decode(_incoming(raw, reading), reading) for raw in raws]
            return [RowSpan(reading, alone)]
        pieces = [raws[first : first + size] for first in range(0, len(raws), size)]
        return [span for piece in pieces for span in self._decode(piece, reading)]

    def _decode_usual(self, raws: Sequence[RawRecord], reading: Reading) -> Span | None:
        """Return None if one record is unusual: no value, too large, not decodable, no id, no handler, redriven."""
        values = [raw.value() for raw in raws]
        if None in values or max(map(len, values)) > self._max_bytes:  # type: ignore[arg-type]
            return None
        try:
            columns = RawColumns(raws, cast("list[bytes]", values), reading.partition, reading.topic_id)
        except Exception:  # a header name is not UTF-8
            return None
        if REDRIVE in map(_name, chain.from_iterable(columns.headers)):
            return None
        types = self._type_chain.column(columns)
        ids = self._id_chain.column(columns)
        if types is None or ids is None or not all(ids):
            return None
        names = set(types)
        timestamps = columns.timestamps()
        if self._scope is not None:
            ids = list(map(self._scope, ids, types, timestamps))  # type: ignore[arg-type]
            if not all(ids):
                return None
        for texts in (ids, [name for name in names if name]):
            if texts and (max(map(len, texts)) > MAX_ID_CHARS or "\0" in "".join(texts)):  # type: ignore[arg-type]
                return None
        decoded = self._values(columns, types, names)
        if decoded is None:
            return None
        message_types, documents = decoded
        columns.breathe()
        inbox_keys = self._keys(cast("list[str]", ids))
        columns.breathe()
        usual = ColumnSpan(
            reading,
            message_types[0],
            cast("list[str]", ids),
            [type_ or None for type_ in types] if "" in names else list(types),
            columns.keys,
            list(documents),
            columns.headers,
            columns.offsets,
            timestamps,
            inbox_keys,
            columns.values,
            columns.checksums(),
            list(columns.sizes()),
        )
        if len(message_types) == 1:
            return usual
        records = usual.rows()
        for record, message_type in zip(records, message_types, strict=True):
            record.message_type, record.in_inbox = message_type, message_type.in_inbox
        return RowSpan(reading, records)

    def _values(
        self, columns: RawColumns, types: Sequence[str | None], names: set[str | None]
    ) -> tuple[list[MessageType], Sequence[Any]] | None:
        """Return one type for all records or one for each, and the values as the handlers want them.

        Returns None if one of the records has no handler or a bad value.
        """
        found = {name: self._types.find(name) for name in names}
        if None in found.values():
            return None
        kinds = cast("list[MessageType]", list(set(found.values())))
        if len(kinds) == 1:
            values = kinds[0].read_all(columns)
            return None if values is None else (kinds, values)
        type_of_each = cast("list[MessageType]", [found[name] for name in types])
        mixed: list[Any] = [None] * len(type_of_each)
        for kind in kinds:
            where = [index for index, type_ in enumerate(type_of_each) if type_ is kind]
            values = kind.read_all(columns.only(where))
            if values is None:
                return None
            for index, value in zip(where, values, strict=True):
                mixed[index] = value
        return type_of_each, mixed

    def decode(self, incoming: Incoming, reading: Reading) -> Record:
        value, key = incoming.value, incoming.key
        failure: Failure | None = None
        decoded: Any = None
        message_type: MessageType | None = None
        if value is not None and len(value) > self._max_bytes:
            failure = Failure("oversized", f"value has {len(value)} bytes; message.max_bytes is {self._max_bytes}")
            incoming.leave_unparsed()
        type_ = self._type_chain.one(incoming, None) or None
        if type_ is not None and ("\0" in type_ or len(type_) > MAX_ID_CHARS):
            # Postgres text cannot hold NUL. A type is a name, so truncating it loses nothing that matters.
            type_ = type_.replace("\0", "\\0")[:MAX_ID_CHARS]
        redriven = REDRIVE in map(_name, incoming.headers)
        id_, id_failure = self._redriven(incoming) if redriven else self._identified(incoming, type_)
        not_ours = redriven and id_failure is None and not id_
        if not_ours:
            id_, failure = _place(incoming), None
        elif failure is None:
            message_type = self._types.find(type_)
            if message_type is None:
                failure = self._no_route(incoming, type_)
            else:
                try:
                    decoded = message_type.read(incoming)
                except BadValue as problem:
                    failure = problem.failure
                except Exception as error:  # from a validator of the handler's own model
                    failure = Failure(
                        "undecodable", f"validating the value failed: {type(error).__name__}: {text_of(error)}"
                    )
        return Record(
            Message(
                id_,
                type_,
                key,
                decoded,
                incoming.headers,
                incoming.topic,
                incoming.partition,
                incoming.offset,
                incoming.timestamp_ms,
            ),
            self._key(id_),
            value,
            checksum_of(value),
            size_of(key, value, incoming.headers),
            message_type,
            not not_ours
            and (message_type is None or message_type.in_inbox or redriven),  # a redriven message has a row
            None if not_ours else failure or incoming.defect or id_failure,
            reading,
            redriven=redriven,
            not_ours=not_ours,
        )

    def _identified(self, incoming: Incoming, type_: str | None) -> tuple[str, Failure | None]:
        """Return the id, or the place in Kafka and the reason why the message has no id."""
        found = self._id_chain.one(incoming, type_)
        if not found:
            problem = incoming.problem
            detail = f"no message id: none of {self._id_names} yields one"
            return _place(incoming), Failure("missing_id", f"{detail} ({problem})" if problem else detail)
        scoped = self._scope(found, type_, incoming.timestamp_ms) if self._scope else found
        if scoped is None:
            detail = "message.window_seconds is set, the record has no timestamp"
            return _place(incoming), Failure("missing_id", detail)
        return _storable(scoped, incoming)

    def _redriven(self, incoming: Incoming) -> tuple[str, Failure | None]:
        """Do as `_identified`, from the header alone: it holds the id with the scope and window of the first time.

        Removes the header, so that the message is the one it was before. Returns an empty id if the message is for
        another consumer.
        """
        found = self._redrive_id.one(incoming, None) or ""
        incoming.headers = [header for header in incoming.headers if header[0] != REDRIVE]
        consumer, colon, id_ = found.partition(":")
        if consumer != self._consumer and colon:
            return "", None
        if not id_:
            return _place(incoming), Failure("missing_id", f"header {REDRIVE} holds no message id")
        return _storable(id_, incoming, MAX_STORED_ID_CHARS)

    def _no_route(self, incoming: Incoming, type_: str | None) -> Failure:
        if type_ is not None:
            return Failure("unknown_type", f"no handler for type {type_!r}, and none for '*'")
        if incoming.problem is not None:
            return incoming.problem.failure
        return Failure("unknown_type", "the message names no type, and there is no handler for '*'")


_name: Callable[[tuple[str, bytes | None]], str] = itemgetter(0)  # the name of a header


def _place(incoming: Incoming) -> str:
    return place(incoming.topic, incoming.topic_id, incoming.partition, incoming.offset)


def _storable(id_: str, incoming: Incoming, most: int = MAX_ID_CHARS) -> tuple[str, Failure | None]:
    if len(id_) > most:
        detail = f"message id has {len(id_)} characters, {most} at most"
        return _place(incoming), Failure("bad_id", detail)
    if "\0" in id_:
        return _place(incoming), Failure("bad_id", "message id contains a NUL character")
    return id_, None


def _incoming(raw: RawRecord, reading: Reading) -> Incoming:
    partition = reading.partition
    kind, timestamp = raw.timestamp()
    defect = None
    try:
        headers = raw.headers() or ()
    except Exception as error:  # a header name is not UTF-8
        headers = ()
        defect = Failure("bad_headers", f"the headers cannot be read: {type(error).__name__}: {error}")
    return Incoming(
        partition.topic,
        partition.number,
        raw.offset(),
        None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp,
        raw.key(),
        raw.value(),
        headers,
        reading.topic_id,
        defect=defect,
    )
