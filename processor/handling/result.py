"""What the handlers of a batch returned: outputs, encoded and packed by partition, and results as JSON."""

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

# The most bytes that Kafka adds to a record besides key, value and headers.
OUTPUT_OVERHEAD = 512
DEFAULT_MESSAGE_MAX_BYTES = 1_000_000
# More bytes than the headers of any output without headers of its own.
STANDARD_HEADERS = 8_192


@dataclass(slots=True)
class BatchResult:
    outgoing: dict[Partition, EncodedOutputs] = field(default_factory=dict)
    results: list[tuple[Record, str]] = field(default_factory=list)  # as JSON
    refused: set[str] = field(default_factory=set)  # statements with a write that Postgres has refused
    _packed: dict[Partition, tuple[EncodedOutputs, bytes | None]] = field(default_factory=dict)

    @property
    def topics(self) -> set[str]:
        return {topic for encoded in self.outgoing.values() for topic in set(encoded.topics)}

    def sent_to(self, topics: Collection[str]) -> dict[tuple[Partition, int], str]:
        """Return partition and offset of the records with outputs to these topics, and one such topic for each."""
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
        """Put the outputs of a partition in the order of their causes, after some were added out of order."""
        if partition in self.outgoing:
            self.outgoing[partition] = self.outgoing[partition].sorted()

    def leave_out(self, records: Iterable[Record]) -> None:
        """Remove the outputs and results of these records."""
        left_out: dict[Partition, set[int]] = {}
        for record in records:
            left_out.setdefault(record.partition, set()).add(record.message.offset)
        for partition, offsets in left_out.items():
            if (encoded := self.outgoing.get(partition)) is not None:
                kept = [index for index, offset in enumerate(encoded.offsets) if offset not in offsets]
                self.outgoing[partition] = encoded.only(kept)
        self.results = [
            (record, result)
            for record, result in self.results
            if record.message.offset not in left_out.get(record.partition, ())
        ]

    def pack(self) -> None:
        """Make the stored form of the outputs now; `packed` makes it again for those that change later."""
        for partition, encoded in self.outgoing.items():
            self._packed[partition] = encoded, stored.pack(encoded)

    def packed(self, partition: Partition) -> bytes | None:
        """Return the stored form of a partition's outputs, or None if there are none."""
        encoded = self.outgoing.get(partition)
        if encoded is None:
            return None
        packed, blob = self._packed.get(partition, (None, None))
        return blob if packed is encoded else stored.pack(encoded)


class Gatherer:
    """Collects what handlers return, and encodes it on request: many outputs at once are cheaper than one at a time."""

    def __init__(
        self,
        batch: Batch,
        silent_below: Mapping[Partition, int],
        max_output: int,
        fail: Callable[[int, Exception], None],
    ) -> None:
        self.result = BatchResult()
        self.outputs: list[Output] = []  # from handlers of one message
        self.answered: list[int] = []  # the index of the message that each of those answers
        self._batch = batch
        self._stretches = batch.stretches()
        self._silent_below = silent_below
        self._max_output = max_output
        self._fail = fail  # called for a message whose outputs cannot be encoded
        # What batch handlers returned: route, the messages' indexes, the handler's argument, and its value.
        self._given: list[tuple[Route, Sequence[int], Any, Any]] = []
        self._causes: Causes | None = None

    def take(self, route: Route, indices: Sequence[int], argument: Any, value: Any) -> None:
        """Keep what a batch handler returned for these messages."""
        self._given.append((route, indices, argument, value))

    def take_one(self, route: Route, index: int, value: Any) -> None:
        """Keep what the handler of one message returned, if it is not a single Output."""
        given, result = registry.given_for_one(route.name, value)
        self._keep_results([(index, result)] if result is not None else ())
        self.outputs += given
        self.answered += [index] * len(given)

    def sort(self) -> None:
        """Put the outputs of several lanes in the order of the messages; outputs of one message keep their order."""
        order = sorted(range(len(self.answered)), key=self.answered.__getitem__)
        self.outputs = [self.outputs[index] for index in order]
        self.answered.sort()

    def encode(self) -> None:
        """Encode what was collected since the last call."""
        given, self._given = self._given, []
        for route, indices, argument, value in given:
            self._encode_batch(route, indices, argument, value)
        if self.outputs:
            self._encode_single()

    def close(self) -> None:
        del self._fail  # it refers to our run: the cycle would keep the batch in memory until garbage collection

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
        """Encode the outputs together, or message by message if some cannot be encoded: those messages fail."""
        given, where = self.outputs, self.answered
        self.outputs, self.answered = [], []
        places = registry.places(where)
        try:
            self._add(where, self._encoded(given, where, places))
        except Exception:
            by_index = [(index, list(run)) for index, run in groupby(range(len(where)), key=where.__getitem__)]
            for index, run in by_index:
                answered = [index] * len(run)
                try:
                    encoded = self._encoded([given[at] for at in run], answered, [places[at] for at in run])
                except Exception as error:
                    self._fail(index, error)
                else:
                    self._add(answered, encoded)

    def _encoded(self, given: Sequence[Output], where: Sequence[int], places: list[int]) -> EncodedOutputs:
        """Encode outputs, and refuse those that Kafka would refuse: after the commit it is too late."""
        encoded = outputs.encode_all(given, self._known_causes(), where, places)
        self._refuse_oversized(encoded)
        return encoded

    def _known_causes(self) -> Causes:
        if self._causes is None:
            self._causes = Causes(self._batch)
        return self._causes

    def _add(self, where: Sequence[int], encoded: EncodedOutputs) -> None:
        """Give each partition its share; `where` has the indexes of the answered records, in order."""
        for partition, start, end in self._stretches:
            first, last = bisect_left(where, start), bisect_left(where, end)
            share = encoded if last - first == len(encoded) else encoded.part(first, last)
            if silent_below := self._silent_below.get(partition):
                share = share.only([index for index, offset in enumerate(share.offsets) if offset >= silent_below])
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
    """Return the most bytes of a record that the producer accepts."""
    most = settings.kafka.producer.get("message.max.bytes", DEFAULT_MESSAGE_MAX_BYTES)
    return int(most) - OUTPUT_OVERHEAD  # type: ignore[arg-type]
