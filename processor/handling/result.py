"""What the handlers of a batch gave: outputs encoded and packed by partition, and results as JSON."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING, Any

from processor.errors import Reject
from processor.handling import registry
from processor.messages import outputs, stored
from processor.messages.message import Output, Outputs
from processor.messages.outputs import Causes

if TYPE_CHECKING:
    from processor.handling.registry import Route
    from processor.messages.batch import Batch
    from processor.messages.message import Partition
    from processor.messages.outputs import EncodedOutputs
    from processor.messages.record import Record
    from processor.settings.schema import Settings

# What Kafka adds to a record at most, besides key, value and headers.
OUTPUT_OVERHEAD = 512
DEFAULT_MESSAGE_MAX_BYTES = 1_000_000
# More than the headers take of any output that has none of its own.
STANDARD_HEADERS = 8_192


@dataclass(slots=True)
class BatchResult:
    outgoing: dict[Partition, EncodedOutputs] = field(default_factory=dict)
    results: list[tuple[Record, str]] = field(default_factory=list)  # as JSON
    refused: set[str] = field(default_factory=set)  # statements of which Postgres has refused a write
    _packed: dict[Partition, tuple[EncodedOutputs, bytes | None]] = field(default_factory=dict)

    @property
    def topics(self) -> set[str]:
        return {topic for encoded in self.outgoing.values() for topic in set(encoded.topics)}

    def sent_to(self, topics: Collection[str]) -> dict[tuple[Partition, int], str]:
        """Who sends to these: partition and offset of the records that are answered there."""
        return {
            (partition, offset): topic
            for partition, encoded in self.outgoing.items()
            for offset, topic in zip(encoded.offsets, encoded.topics, strict=True)
            if topic in topics
        }

    def add(self, partition: Partition, encoded: EncodedOutputs) -> None:
        self._packed.pop(partition, None)
        if partition in self.outgoing:
            self.outgoing[partition].extend(encoded)
        else:
            self.outgoing[partition] = encoded

    def sort(self, partition: Partition) -> None:
        """Put the outputs of a partition in the order of their causes, after some were added out of turn."""
        if partition in self.outgoing:
            self.outgoing[partition] = self.outgoing[partition].sorted()

    def leave_out(self, records: Iterable[Record]) -> None:
        """What these gave does not count."""
        left_out: dict[Partition, set[int]] = {}
        for record in records:
            left_out.setdefault(record.partition, set()).add(record.message.offset)
        for partition, offsets in left_out.items():
            if (encoded := self.outgoing.get(partition)) is not None:
                kept = [at for at, offset in enumerate(encoded.offsets) if offset not in offsets]
                self.outgoing[partition] = encoded.only(kept)
        self.results = [
            (record, result)
            for record, result in self.results
            if record.message.offset not in left_out.get(record.partition, ())
        ]

    def pack(self) -> None:
        """Make the stored form of the outputs now; it is made again for those that change later."""
        for partition, encoded in self.outgoing.items():
            self._packed[partition] = encoded, stored.pack(encoded)

    def packed(self, partition: Partition) -> bytes | None:
        """What is stored of a partition's outputs; None if there are none."""
        encoded = self.outgoing.get(partition)
        if encoded is None:
            return None
        of, blob = self._packed.get(partition, (None, None))
        return blob if of is encoded else stored.pack(encoded)


class Gatherer:
    """Takes what handlers give, and encodes it when told to: many outputs in one go are cheaper than one at a time."""

    def __init__(
        self,
        batch: Batch,
        silent_below: Mapping[Partition, int],
        max_output: int,
        fail: Callable[[int, Exception], None],
    ) -> None:
        self.result = BatchResult()
        self.outputs: list[Output] = []  # of handlers of one message
        self.answered: list[int] = []  # which message each of those answers
        self._batch = batch
        self._stretches = batch.stretches()
        self._silent_below = silent_below
        self._max_output = max_output
        self._fail = fail  # a message whose outputs cannot be encoded
        self._given: list[tuple[Route, Sequence[int], Any, Any]] = []  # by batch handlers, for which messages
        self._causes: Causes | None = None

    def take(self, route: Route, indices: Sequence[int], argument: Any, value: Any) -> None:
        """What a batch handler gave for these messages."""
        self._given.append((route, indices, argument, value))

    def take_one(self, route: Route, index: int, value: Any) -> None:
        """What the handler of one message gave besides a single output."""
        given, result = registry.given_for_one(route.name, value)
        self._keep_results([(index, result)] if result is not None else ())
        self.outputs += given
        self.answered += [index] * len(given)

    def sort(self) -> None:
        """Put what lanes gave in the order of the messages; several outputs of one message stay as they are."""
        order = sorted(range(len(self.answered)), key=self.answered.__getitem__)
        self.outputs = [self.outputs[at] for at in order]
        self.answered.sort()

    def encode(self) -> None:
        """Encode what was given since the last time."""
        given, self._given = self._given, []
        for route, indices, argument, value in given:
            self._encode_batch(route, indices, argument, value)
        if self.outputs:
            self._encode_single()

    def close(self) -> None:
        del self._fail  # refers to the run that has us: together they would keep the batch until garbage is collected

    def _encode_batch(self, route: Route, indices: Sequence[int], argument: Any, value: Any) -> None:
        if isinstance(value, Outputs):
            encoded = outputs.encode_each(value, self._known_causes(), indices)
            self._refuse_oversized(encoded)
            self._add(indices, encoded)
            return
        given = registry.given_for_batch(route.name, argument, value)
        self._keep_results([(indices[index], result) for index, result in given.results])
        where = indices if isinstance(given.where, range) else [indices[index] for index in given.where]
        self._add(where, self._encoded(given.outputs, where, given.places))

    def _encode_single(self) -> None:
        """All together, or one by one where a message's outputs cannot be encoded: that one has failed."""
        given, where = self.outputs, self.answered
        self.outputs, self.answered = [], []
        places = registry.places(where)
        try:
            self._add(where, self._encoded(given, where, places))
        except Exception:
            by_index = [(index, list(run)) for index, run in groupby(range(len(where)), key=where.__getitem__)]
            for index, run in by_index:
                of = [index] * len(run)
                try:
                    encoded = self._encoded([given[at] for at in run], of, [places[at] for at in run])
                except Exception as error:
                    self._fail(index, error)
                else:
                    self._add(of, encoded)

    def _encoded(self, given: Sequence[Output], where: Sequence[int], places: list[int]) -> EncodedOutputs:
        """Refuses what Kafka would refuse: after the commit there is no way back."""
        encoded = outputs.encode_all(given, self._known_causes(), where, places)
        self._refuse_oversized(encoded)
        return encoded

    def _known_causes(self) -> Causes:
        if self._causes is None:
            self._causes = Causes(self._batch)
        return self._causes

    def _add(self, where: Sequence[int], encoded: EncodedOutputs) -> None:
        """Give each partition its share; `where` has the records that are answered, in order."""
        for partition, start, end in self._stretches:
            first, last = bisect_left(where, start), bisect_left(where, end)
            share = encoded if last - first == len(encoded) else encoded.part(first, last)
            if silent_below := self._silent_below.get(partition):
                share = share.only([at for at, offset in enumerate(share.offsets) if offset >= silent_below])
            if len(share):
                self.result.add(partition, share)

    def _keep_results(self, results: Iterable[tuple[int, Any]]) -> None:
        for index, result in results:
            self.result.results.append((self._batch.as_rows()[index], outputs.dump_json(result).decode()))

    def _refuse_oversized(self, encoded: EncodedOutputs) -> None:
        if not len(encoded):
            return
        most = self._max_output
        longest = _longest(encoded.values) + _longest(encoded.keys)
        if longest <= most - STANDARD_HEADERS and not any(encoded.extras):
            return
        for output in encoded:
            size = output.size()
            if size > most:
                raise Reject(f"output to {output.topic} has {size} bytes, {most} at most")


def _longest(column: list[bytes | None]) -> int:
    return max(map(len, filter(None, column)), default=0)


def max_output(settings: Settings) -> int:
    """The bytes that a record may have for the producer to take it."""
    most = settings.kafka.producer.get("message.max.bytes", DEFAULT_MESSAGE_MAX_BYTES)
    return int(most) - OUTPUT_OVERHEAD  # type: ignore[arg-type]
