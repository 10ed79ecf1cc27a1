"""The end of an audit: what was written down is compared, bucket by bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import groupby
from operator import attrgetter

from processor.messages.message import Partition
from processor.operations.verify.findings import Finding, Findings
from processor.operations.verify.origins import output_id
from processor.operations.verify.questions import FORGOTTEN, WITHOUT_INBOX, Book, Placed, Question

# Outputs of one message are sent in one Kafka transaction: their timestamps are no further apart.
TOGETHER_MS = 60_000


class Settlement:
    def __init__(
        self,
        book: Book,
        topics: Sequence[str],
        inputs: Counter[str],
        outputs: Counter[str],
        findings: Findings,
        *,
        below: Mapping[Partition, int],
        origins_complete: bool,
        gaps_from_ms: int | None,
    ) -> None:
        self._book = book
        self._topics = topics
        self._inputs = inputs
        self._outputs = outputs
        self._findings = findings
        self._below = below
        self._origins_complete = origins_complete  # an output whose message is nowhere comes from nowhere
        self._gaps_from_ms = gaps_from_ms  # outputs older than this may have expired; None: no gap proves a loss

    def settle(self, number: int) -> None:
        settled = self._book.settled(number)
        questions = self._book.questions(number)
        for question in questions:  # retention may have come by since
            if question.kind != "orphan_output" and self._is_forgotten(question):
                settled.setdefault(bytes.fromhex(question.key), FORGOTTEN)
        unknown = set()
        for question in questions:
            if question.kind == "orphan_output":
                if not self._settle_output(question, settled):
                    unknown.add(bytes.fromhex(question.key))
            else:
                self._settle_record(question, settled)
        for key, group in groupby(self._book.outputs(number), attrgetter("key")):
            # Without inbox, a repeated message has its outputs again.
            if settled.get(key) != WITHOUT_INBOX and key not in unknown:
                self._compare(list(group))

    def _is_forgotten(self, question: Question) -> bool:
        return question.offset < self._below.get(Partition(question.topic, question.partition), 0)

    def _settle_record(self, question: Question, settled: Mapping[bytes, bytes]) -> None:
        match settled.get(bytes.fromhex(question.key)):
            case None | b"W":
                self._findings.add(_finding(question))
            case _ if self._is_forgotten(question):
                self._inputs["forgotten"] += 1
            case _:
                self._inputs["duplicate"] += 1  # of a message that was forgotten since

    def _settle_output(self, question: Question, settled: Mapping[bytes, bytes]) -> bool:
        """Return False if its origin cannot be known."""
        reason = settled.get(bytes.fromhex(question.key))
        if reason is not None:
            self._outputs["with_origin"] += 1
        elif self._origins_complete:
            self._findings.add(_finding(question))
        else:
            self._outputs["origin_unknown"] += 1
            return False
        return True

    def _compare(self, outputs: list[Placed]) -> None:
        """Find what comes twice, and what is missing, among the outputs of one message."""
        last = outputs[-1].place
        if last == 0 and len(outputs) == 1:
            return
        seen: dict[int, Placed] = {}
        for output in outputs:
            first = seen.setdefault(output.place, output)
            if first is not output:
                why = f"the first is at {self._where(first)}"
                self._find("doubled_output", output, output_id(output), why)
        oldest = min(output.timestamp_ms for output in outputs)
        if len(seen) == last + 1 or self._gaps_from_ms is None or oldest < self._gaps_from_ms + TOGETHER_MS:
            return
        missing = next(place for place in range(last) if place not in seen)
        others = last - len(seen)
        why = "a later one of its message is here; is it in a topic that was not read?"
        why += f" {others} more of this message are missing" if others else ""
        self._find("missing_output", outputs[-1], output_id(outputs[-1]._replace(place=missing)), why)

    def _find(self, kind: str, output: Placed, named: str, why: str) -> None:
        topic = self._topics[output.topic]
        self._findings.add(Finding(kind, topic, output.partition, output.offset, named, why))

    def _where(self, output: Placed) -> str:
        return f"{self._topics[output.topic]}[{output.partition}] offset {output.offset}"


def _finding(question: Question) -> Finding:
    return Finding(question.kind, question.topic, question.partition, question.offset, question.id, question.why)
