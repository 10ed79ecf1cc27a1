"""Handlers that act outside the database: call a payment gateway, send an e-mail.

No transaction can undo such an act, so it takes three steps. First the intent is committed: the inbox row becomes
`processing`, with a lease. Then the handler is called, outside any transaction; the message's id is the idempotency
key by which the other side recognises a repetition. Its writes are recorded here, and applied in the transaction that
completes the message. A process that dies in between leaves a lease that expires.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn

from processor.handling.queue import QUEUED, Queued, TransactionCommandError

if TYPE_CHECKING:
    from processor.handling.database import Database


class Effect:
    """The outcome of a handler that acted: what it returned, and the writes that it asked for."""

    def __init__(self) -> None:
        self.value: Any = None
        self._writes: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def record(self, method: str, *args: Any, **kwargs: Any) -> None:
        self._writes.append((method, args, kwargs))

    def apply(self, database: Database) -> Any:
        """Queue the writes in the transaction that completes the message; return what the handler returned."""
        for method, args, kwargs in self._writes:
            getattr(database, method)(*args, **kwargs)
        return self.value


class EffectDatabase:
    """The Database of such a handler: it can queue writes, but not read, because no transaction is open."""

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
        self._effect.record(method, *args, **kwargs)
        return QUEUED
