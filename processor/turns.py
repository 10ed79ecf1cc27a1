"""Batches of one consumer side by side, until they are caught in a deadlock; then one at a time for a while.

Handlers lock their rows in whatever order messages come. Two workers that do so on the same hot rows are in a
deadlock with nearly every batch, and Postgres takes a second to notice each. So every batch holds its
consumer's advisory lock, shared: that costs nothing. A batch that was in a deadlock runs again with the lock to
itself, which no other batch of the consumer can disturb, and so do the next ones.
"""

from __future__ import annotations

import hashlib

# So many batches are run alone after a deadlock; twice as many each time it was not enough.
FIRST_ALONE = 16
MOST_ALONE = 1024


class Turns:
    def __init__(self, consumer: str) -> None:
        digest = hashlib.sha256(f"processor-turn:{consumer}".encode()).digest()
        self._lock = int.from_bytes(digest[:8], "big", signed=True)
        self._alone = 0
        self._after_deadlock = FIRST_ALONE

    @property
    def alone(self) -> bool:
        return self._alone > 0

    @property
    def begin(self) -> str:
        """SQL that begins a transaction and waits for its turn; the end of the transaction gives it back."""
        shared = "" if self._alone else "_shared"
        return f"BEGIN; SELECT pg_advisory_xact_lock{shared}({self._lock})"

    def committed(self) -> None:
        if self._alone:
            self._alone -= 1

    def deadlocked(self) -> None:
        self._alone = self._after_deadlock
        self._after_deadlock = min(2 * self._after_deadlock, MOST_ALONE)
