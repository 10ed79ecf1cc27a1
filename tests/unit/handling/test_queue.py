"""What is queued keeps its order per key, and otherwise goes out in as few statements as that allows."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest

from processor.handling.database import Database
from processor.handling.queue import Queue, TransactionCommandError
from processor.postgres.footprints import Footprint

ORDERS, STOCK, NOTES = "INSERT INTO orders VALUES ($1)", "UPDATE stock SET reserved = $1", "INSERT INTO notes SELECT $1"


class KnownStatements:
    """Stands for the statements of a connection: nothing is sent here, and footprints are what the test says."""

    arrays = SimpleNamespace(arguments=None)

    def __init__(self, footprints: dict[str, Footprint]) -> None:
        self._footprints = footprints
        self.wanted: set[str] = set()

    def footprint(self, sql: str) -> Footprint | None:
        return self._footprints.get(sql)

    def doubt_footprints(self) -> None:
        self._footprints = {}

    def want_footprints(self, statements: Iterable[str]) -> None:
        self.wanted.update(statements)


def queue(**writes: set[int]) -> Queue:
    """A queue that knows, by the names of the statements here, what they write."""
    footprints = {globals()[name]: Footprint(frozenset(), frozenset(ids)) for name, ids in writes.items()}
    statements: Any = KnownStatements(footprints)
    return Queue(statements, lambda _index, error: pytest.fail(str(error)))


def waiting(queue: Queue) -> list[tuple[str, list[Any]]]:
    """What would be sent, in order: the statement or table, and the first argument of each row."""
    return [(group.what, [row[0] for row in group.rows if row is not None]) for group in queue._groups]


async def test_equal_statements_of_different_keys_go_together() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    for key in ("a", "b", "c"):
        db.serve((key,))
        db.write(ORDERS, key)
        db.collect(STOCK, key)
    assert waiting(waiting_queue) == [(ORDERS, ["a", "b", "c"]), (STOCK, ["a", "b", "c"])]


async def test_nothing_overtakes_what_its_key_has_queued() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    db.serve(("a",))
    db.write(ORDERS, "a1")
    db.write(STOCK, "a2")
    db.serve(("b",))
    db.write(ORDERS, "b1")
    db.serve(("a",))
    db.write(ORDERS, "a3")
    db.serve(("b",))
    db.write(STOCK, "b2")
    assert waiting(waiting_queue) == [(ORDERS, ["a1", "b1"]), (STOCK, ["a2", "b2"]), (ORDERS, ["a3"])]


async def test_order_of_a_key_is_kept_by_whoever_serves_it_next() -> None:
    """As in lanes and pieces of a batch: each has a Database of its own."""
    waiting_queue = queue()
    first, second = Database(waiting_queue), Database(waiting_queue)
    first.serve(("a",))
    first.write(ORDERS, "a1")
    first.write(STOCK, "a2")
    first.serve(None)
    second.serve(("a",))
    second.write(ORDERS, "a3")
    assert waiting(waiting_queue) == [(ORDERS, ["a1"]), (STOCK, ["a2"]), (ORDERS, ["a3"])]


def served(db: Database, *steps: tuple[str, str]) -> None:
    """Queue for each key and statement one write, with the key and its number in the whole."""
    for number, (key, sql) in enumerate(steps, 1):
        db.serve((key,))
        db.write(sql, f"{key}{number}")


async def test_groups_grow_with_the_repeats_of_one_key_and_not_of_all() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    for number in range(1000):
        db.serve((number * 7919 % 1000 % 100,))
        db.write(ORDERS, number)
        db.write(STOCK, number)
    assert [what for what, _ in waiting(waiting_queue)] == [ORDERS, STOCK] * 10
    assert sorted(number for _, rows in waiting(waiting_queue) for number in rows) == sorted([*range(1000)] * 2)


async def test_statements_that_touch_nothing_in_common_are_sent_once_however_keys_repeat() -> None:
    waiting_queue = queue(ORDERS={1}, STOCK={2})
    served(Database(waiting_queue), ("a", ORDERS), ("a", STOCK), ("a", ORDERS), ("b", STOCK), ("a", STOCK))
    assert waiting(waiting_queue) == [(ORDERS, ["a1", "a3"]), (STOCK, ["a2", "b4", "a5"])]


async def test_statements_that_touch_the_same_keep_the_order_of_each_key_beside_one_that_does_not() -> None:
    waiting_queue = queue(ORDERS={1}, STOCK={1}, NOTES={3})
    db = Database(waiting_queue)
    served(db, *[("a", sql) for sql in (ORDERS, STOCK, NOTES, ORDERS, NOTES)])
    assert waiting(waiting_queue) == [(ORDERS, ["a1"]), (STOCK, ["a2"]), (NOTES, ["a3", "a5"]), (ORDERS, ["a4"])]


async def test_statement_that_touches_what_others_do_comes_behind_all_that_they_have_queued() -> None:
    waiting_queue = queue(ORDERS={1}, STOCK={2}, NOTES={1, 2})
    steps = [("a", ORDERS), ("a", STOCK), ("b", STOCK), ("b", NOTES), ("b", STOCK), ("c", ORDERS), ("c", NOTES)]
    served(Database(waiting_queue), *steps)
    expected = [(ORDERS, ["a1"]), (STOCK, ["a2", "b3"]), (NOTES, ["b4"]), (STOCK, ["b5"]), (ORDERS, ["c6"])]
    assert waiting(waiting_queue) == [*expected, (NOTES, ["c7"])]


async def test_names_that_may_mean_other_tables_by_now_are_trusted_no_more() -> None:
    waiting_queue = queue(ORDERS={1}, STOCK={2})
    db = Database(waiting_queue)
    served(db, ("a", ORDERS), ("a", STOCK))
    waiting_queue.check("SET LOCAL search_path = other")
    served(db, ("a", ORDERS), ("a", STOCK), ("a", ORDERS))
    groups = [(ORDERS, ["a1"]), (STOCK, ["a2"]), (ORDERS, ["a1"]), (STOCK, ["a2"]), (ORDERS, ["a3"])]
    assert waiting(waiting_queue) == groups


async def test_footprints_are_asked_for_only_where_a_key_comes_again() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    served(db, ("a", ORDERS), ("a", STOCK), ("b", ORDERS), ("b", STOCK))
    statements: Any = waiting_queue.statements
    assert statements.wanted == set()
    served(db, ("a", ORDERS))
    assert statements.wanted == {ORDERS, STOCK}


async def test_what_has_no_key_keeps_its_place_among_equal_statements() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    served(db, ("a", ORDERS), ("a", STOCK), ("a", ORDERS))
    db.serve(object())
    db.write(ORDERS, "without")
    assert waiting(waiting_queue) == [(ORDERS, ["a1"]), (STOCK, ["a2"]), (ORDERS, ["a3", "without"])]


async def test_rows_with_other_columns_are_inserted_apart() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    for number in range(4):
        db.serve((number,))
        if number % 2:
            db.insert("orders", id=number, note="odd")
        else:
            db.insert("orders", id=number)
    assert waiting(waiting_queue) == [("orders", [0, 2]), ("orders", [1, 3])]


async def test_keep_order_puts_all_that_follows_behind_what_is_there() -> None:
    waiting_queue = queue()
    db = Database(waiting_queue)
    db.serve(("a",))
    db.write(ORDERS, "a1")
    waiting_queue.keep_order()
    db.serve(("b",))
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
