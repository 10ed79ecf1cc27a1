"""How often a batch waits for Postgres, by what for: far from the database, that decides how long it takes.

A round trip is a request to Postgres that nothing goes on without the answer to. Every request of asyncpg goes through
one of a few methods of its connection's protocol, so they are counted there, whoever makes them: an integer goes up,
and nothing else happens. Each costs one round trip. So does COPY: asyncpg sends the data right behind the command.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from asyncpg import Connection, Record

# In the order of the walk. Of `handlers` are the statements that they wait for, of `writes` those that they queue;
# `keep` is for failed messages and results. What is `other` is no step of a batch: a rollback.
Purpose: TypeAlias = Literal["begin", "claim", "handlers", "writes", "keep", "ledger", "commit", "other"]
# Of a statement's first use on a connection, or of the end of one that is not used any more, whatever it is for. To
# look up a type that asyncpg does not know takes it up to three statements more; they count where they occur.
PREPARE = "prepare"

_REQUESTS = ("query", "bind_execute", "bind_execute_many", "copy_in", "copy_out")
_PREPARING = ("prepare", "close_statement")


class RoundTrips:
    """The round trips of a session's connections."""

    def __init__(self) -> None:
        self.purpose: Purpose = "other"  # of all that come next
        self._counts: defaultdict[str, int] = defaultdict(int)

    def watch(self, connection: Connection[Record]) -> None:
        """From now on, count what is asked on this connection."""
        protocol = connection._protocol  # type: ignore[attr-defined]  # noqa: SLF001 - every request goes through it
        for name in _REQUESTS:
            setattr(protocol, name, self._counted(getattr(protocol, name)))
        for name in _PREPARING:
            setattr(protocol, name, self._counted(getattr(protocol, name), PREPARE))

    def take(self) -> dict[str, int]:
        """Return how many there were since the last call, by their purpose; a batch is over."""
        self.purpose = "other"
        counts, self._counts = self._counts, defaultdict(int)
        return dict(counts)

    def _counted(self, request: Callable[..., Any], purpose: str | None = None) -> Callable[..., Any]:
        def counted(*args: Any, **options: Any) -> Any:
            self._counts[purpose or self.purpose] += 1
            return request(*args, **options)

        return counted
