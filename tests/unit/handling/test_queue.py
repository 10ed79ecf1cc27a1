"""What is queued keeps its order per key, and otherwise goes out in as few statements as that allows."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from processor.handling.database import Database
from processor.handling.queue import Queue, TransactionCommandError

ORDERS, STOCK = "INSERT INTO orders VALUES ($1)", "UPDATE stock SET reserved = $1"


def queue() -> Queue:
    statements: Any = SimpleNamespace(arrays=SimpleNamespace(arguments=None))  # nothing is sent here
    return Queue(statements, lambda _index, error: pytest.fail(str(error)))


def waiting(queue: Queue) -> list[tuple[str, list[Any]]]:
    """What would be sent, in order: the statement or table, and the first argument of each row."""
    return [(group.what, [row[0] for row in group.rows if row is not None]) for group in queue._groups]


async def test_equal_statements_of_different_keys_go_together() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    for key in ("a", "b", "c"):
        db.serve(key)
        db.write(ORDERS, key)
        db.collect(STOCK, key)
    assert waiting(waiting_queue) == [(ORDERS, ["a", "b", "c"]), (STOCK, ["a", "b", "c"])]


async def test_nothing_overtakes_what_its_key_has_queued() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    db.serve("a")
    db.write(ORDERS, "a1")
    db.write(STOCK, "a2")
    db.serve("b")
    db.write(ORDERS, "b1")
    db.serve("a")
    db.write(ORDERS, "a3")
    db.serve("b")
    db.write(STOCK, "b2")
    assert waiting(waiting_queue) == [(ORDERS, ["a1", "b1"]), (STOCK, ["a2", "b2"]), (ORDERS, ["a3"])]


async def test_order_of_a_key_is_kept_by_whoever_serves_it_next() -> None:
    """As in lanes and pieces of a batch: each has a Database of its own."""
    waiting_queue = queue()
    first, second = Database(waiting_queue), Database(waiting_queue)
    first.serve("a")
    first.write(ORDERS, "a1")
    first.write(STOCK, "a2")
    first.serve(None)
    second.serve("a")
    second.write(ORDERS, "a3")
    assert waiting(waiting_queue) == [(ORDERS, ["a1"]), (STOCK, ["a2"]), (ORDERS, ["a3"])]


async def test_rows_with_other_columns_are_inserted_apart() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    for number in range(4):
        db.serve(number)
        if number % 2:
            db.insert("orders", id=number, note="odd")
        else:
            db.insert("orders", id=number)
    assert waiting(waiting_queue) == [("orders", [0, 2]), ("orders", [1, 3])]


async def test_keep_order_puts_all_that_follows_behind_what_is_there() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    db.serve("a")
    db.write(ORDERS, "a1")
    waiting_queue.keep_order()
    db.serve("b")
    db.write(ORDERS, "b1")
    assert waiting(waiting_queue) == [(ORDERS, ["a1"]), (ORDERS, ["b1"])]


@pytest.mark.parametrize("call", ["write", "collect"])
async def test_transaction_command_is_refused_when_it_is_queued(call: str) -> None:
    db = Database(queue())
    with pytest.raises(TransactionCommandError, match="the batch owns the transaction"):
        getattr(db, call)("COMMIT", 1)


@pytest.mark.parametrize("call", [lambda db: db.write(ORDERS, 1), lambda db: db.insert("orders", id=1)])
async def test_nothing_is_queued_when_the_batch_is_over(call: Any) -> None:
    closed = queue()
    db = Database(closed)
    call(db)
    closed.close()
    with pytest.raises(TransactionCommandError, match="belongs to a batch that is over"):
        call(db)
