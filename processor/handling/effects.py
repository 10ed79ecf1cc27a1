"""Handlers that act on the world outside: a payment gateway, an e-mail.

No transaction can take such an act back, so it is done in three steps. First the intent is committed: the
inbox row says `processing`, with a lease. Then the handler is called, outside any transaction; the message's id is
the idempotency key that lets the other side recognise a repetition. What it wants to write is put down here, and
applied in the transaction that completes the message. Whoever dies in between leaves a lease that runs out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from processor.handling.queue import QUEUED, Queued, TransactionCommandError

if TYPE_CHECKING:
    from processor.handling.database import Database


class Effect:
    """What a handler did: what it returned, and what it wants to be written."""

    def __init__(self) -> None:
        self.value: Any = None
        self._writes: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def put_down(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._writes.append((method, args, kwargs))

    def apply(self, database: Database) -> Any:
        """Queue the writes in the transaction that completes the message; gives what the handler returned."""
        for method, args, kwargs in self._writes:
            getattr(database, method)(*args, **kwargs)
        return self.value


class EffectDatabase:
    """What such a handler is given as its Database: it can queue writes, and there is nothing to read from."""

    def __init__(self, effect: Effect) -> None:
        self._effect = effect

    def write(self, sql: str, *args: Any) -> Queued:
        return self._put("write", sql, *args)

    def collect(self, sql: str, *args: Any) -> Queued:
        return self._put("collect", sql, *args)

    def insert(self, table: str, **columns: Any) -> Queued:
        return self._put("insert", table, **columns)

    async def execute(self, *_args: Any) -> NoReturn:
        raise TransactionCommandError(
            "a handler with effect = true is called outside any transaction: queue with write(), collect() or insert()"
        )

    fetch = fetchrow = fetchval = execute

    def _put(self, method: str, *args: Any, **kwargs: Any) -> Queued:
        self._effect.put_down(method, *args, **kwargs)
        return QUEUED
