"""The outputs' side of an audit: each has one origin, a message that was completed.

An output of the processor carries the id of the message that caused it (`causation-id`), and an id of its own
(`message-id`): the key of that message in the inbox, in hexadecimal, a dash, and its place among the outputs of that
message, from 0. This is written again here on purpose, see `messages/outputs.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from processor.operations.verify.findings import Finding, Findings
from processor.operations.verify.identity import Raw, headers_of, keys
from processor.operations.verify.questions import MOST_PLACES, Book, Placed, Question
from processor.postgres import audit

if TYPE_CHECKING:
    from processor.operations.verify.plan import Span
    from processor.postgres.session import Connection

MESSAGE_ID = "message-id"
CAUSATION_ID = "causation-id"
DEAD_LETTER = "dlq-reason"  # a dead letter keeps the headers of the record that it is about


class Seen(NamedTuple):
    """One record of an output topic."""

    offset: int
    id: bytes | None
    cause: bytes | None
    placed: Placed | None  # None: its headers do not say that we have sent it
    dead_letter: bool


class Origins:
    def __init__(
        self,
        consumer: str,
        topics: Sequence[str],
        book: Book,
        counts: Counter[str],
        findings: Findings,
        *,
        sole_writer: bool,
    ) -> None:
        self._consumer = consumer
        self._key = keys(consumer)
        self._topics = {topic: number for number, topic in enumerate(topics)}
        self._book = book
        self._counts = counts
        self._findings = findings
        self._sole_writer = sole_writer

    def read(self, raws: Sequence[Raw], span: Span) -> list[Seen]:
        """Recognise our outputs among the records. Costs processor time alone."""
        key_of, topic, partition = self._key, self._topics[span.topic], span.partition
        seen = []
        for raw in raws:
            headers = headers_of(raw)
            id_, cause = headers.get(MESSAGE_ID), headers.get(CAUSATION_ID)
            placed, letter = None, DEAD_LETTER in headers
            if id_ and cause is not None and not letter:
                hex_, _, place = id_.partition(b"-")
                key = key_of(cause)
                if hex_ == key.hex().encode() and place.isdigit() and int(place) < MOST_PLACES:
                    timestamp = max(raw.timestamp()[1], 0)
                    placed = Placed(key, int(place), timestamp, topic, partition, raw.offset() or 0)
            seen.append(Seen(raw.offset() or 0, id_, cause, placed, letter))
        return seen

    async def judge(self, db: Connection, seen: list[Seen], span: Span) -> None:
        self._counts["records"] += len(seen)
        ours = []
        for one in seen:
            if one.placed is not None:
                self._book.place(one.placed)
                ours.append(one.placed)
            elif one.dead_letter:
                self._counts["dead_letters"] += 1
            elif not self._sole_writer:
                self._counts["of_others"] += 1
            else:
                why = f"its headers do not say that {self._consumer} has sent it"
                self._findings.add(Finding("orphan_output", *span.at, one.offset, _readable(one.id), why))
        found = await audit.not_completed(db, [output.key.hex() for output in ours]) if ours else []
        self._counts["with_origin"] += len(ours) - len(found)
        causes = {one.placed: one.cause for one in seen} if found else {}
        for index, status in found:
            output = ours[index]
            cause = _readable(causes[output])
            named = output_id(output)
            if status is None:
                why = f"{self._consumer} has no message {cause!r}"
                self._book.ask(Question(output.key.hex(), "orphan_output", *span.at, output.offset, named, why))
            else:
                why = f"its cause {cause!r} is {status}, not completed"
                self._findings.add(Finding("orphan_output", *span.at, output.offset, named, why))


def _readable(text: bytes | None) -> str | None:
    return None if text is None else text.decode(errors="replace")


def output_id(output: Placed) -> str:
    return f"{output.key.hex()}-{output.place}"
