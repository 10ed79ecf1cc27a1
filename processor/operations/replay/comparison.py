"""How outputs that were made now differ from those that are in the output topics.

What was made is kept as digests in memory, and in full in a temporary file, from which samples are shown.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import orjson

from processor.messages import wire
from processor.messages.message import last_header
from processor.messages.outputs import CAUSATION_ID, CORRELATION_ID, MESSAGE_ID, REPLAY

if TYPE_CHECKING:
    from processor.kafka.published import Scanned
    from processor.messages.message import Headers
    from processor.messages.outputs import Outgoing

SAMPLES = 10
# Headers that follow from the cause, or say that a replay sent it.
_ITS_OWN = (MESSAGE_ID, CAUSATION_ID, CORRELATION_ID, REPLAY)


class Difference(StrEnum):
    CHANGED = "changed"  # it was sent with another topic, key, value or header
    NEW = "new"  # none of this id is there
    GONE = "gone"  # it is there, and the message has no such output now


@dataclass(slots=True)
class Comparison:
    same: int
    different: dict[str, int]  # outputs, by difference
    messages: list[str]  # ids of the messages whose outputs differ, in the order in which they were read
    samples: list[dict[str, Any]]


@dataclass(slots=True)
class _Output:
    cause: str
    difference: Difference | None
    digest: bytes = b""
    made_at: int | None = None  # where in the file
    sent: dict[str, Any] | None = None


@dataclass(slots=True)
class Comparer:
    topics: set[str] = field(default_factory=set)  # to which something was made
    _processed: dict[str, str] = field(default_factory=dict)  # the messages' ids by their inbox keys
    _outputs: dict[str, _Output] = field(default_factory=dict)  # by id
    _file: Any = field(default_factory=tempfile.TemporaryFile)
    _shown: int = 0

    def processed(self, key: bytes, message_id: str) -> None:
        self._processed[key.hex()] = message_id

    def made(self, output: Outgoing) -> None:
        """Note an output of today."""
        assert output.id is not None
        described = _described(output.topic, output.key, output.value, output.headers())
        self.topics.add(output.topic)
        self._outputs[output.id] = _Output(output.cause_id, Difference.NEW, _digest(described), self._file.tell())
        self._file.write(described + b"\n")

    def sent(self, record: Scanned) -> None:
        """Compare a record of an output topic; of several with one id the last one counts."""
        id_ = (last_header(record.headers, MESSAGE_ID) or b"").decode(errors="replace")
        cause = self._processed.get(id_.rpartition("-")[0])
        if cause is None:
            return
        described = _described(record.topic, record.key, record.value, record.headers)
        made = self._outputs.setdefault(id_, _Output(cause, Difference.GONE))
        if made.made_at is not None:
            made.difference = None if made.digest == _digest(described) else Difference.CHANGED
        if made.difference is not None and self._shown < SAMPLES:
            self._shown += made.sent is None
            made.sent = orjson.loads(described)

    def result(self) -> Comparison:
        different = {id_: one for id_, one in self._outputs.items() if one.difference is not None}
        causes = {one.cause for one in different.values()}
        chosen = sorted(different.items(), key=lambda item: item[1].sent is None)[:SAMPLES]
        samples = [
            {
                "message_id": one.cause,
                "output_id": id_,
                "difference": one.difference,
                "sent": one.sent,
                "made": self._made(one),
            }
            for id_, one in chosen
        ]
        self._file.close()
        return Comparison(
            len(self._outputs) - len(different),
            dict(Counter(str(one.difference) for one in different.values())),
            [message_id for message_id in self._processed.values() if message_id in causes],
            samples,
        )

    def _made(self, one: _Output) -> dict[str, Any] | None:
        if one.made_at is None:
            return None
        self._file.seek(one.made_at)
        found: dict[str, Any] = orjson.loads(self._file.readline())
        return found


def _described(topic: str, key: bytes | None, value: bytes | None, headers: Headers) -> bytes:
    kept = [(name, text) for name, text in headers if name not in _ITS_OWN]
    return orjson.dumps(
        {
            "topic": topic,
            "key": wire.dump_value(key),
            "value": wire.dump_value(value),
            "headers": orjson.loads(wire.dump_headers(kept)),
        }
    )


def _digest(described: bytes) -> bytes:
    return hashlib.blake2b(described, digest_size=16).digest()
