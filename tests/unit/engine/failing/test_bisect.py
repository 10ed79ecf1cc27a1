"""A batch that does not go through is taken apart until the message at fault stands alone, and nothing is left out."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest

from processor.engine.failing.bisect import Remaining, let_go
from processor.messages.batch import Batch
from tests.support.readings import reading
from tests.support.spans import ONE, span
from tests.unit.engine.given import FAILURE, batch_of, caused_by, offsets, owned_partition, records_of

# A dozen for each bad record among a thousand: the halvings, the record alone, the rest.
DOZEN = 13


def take_apart(batch: Batch, bad: Collection[int]) -> tuple[list[list[int]], list[list[int]]]:
    """Tries parts until all are committed, as the loop does when it is not known which record is at fault.

    Gives what was tried, and what of that was committed, by offset. A record that was found fails, and then goes
    through.
    """
    remaining, tried, committed = Remaining(batch), [], []
    while part := remaining.part():
        tried.append(offsets(part))
        if any(record.message.offset in bad and record.failure is None for record in part.as_rows()):
            alone = remaining.narrow()
            if alone is not None:
                assert tried[-1] == [alone.message.offset]
                alone.failure = FAILURE
                remaining.found()
        else:
            committed.append(tried[-1])
            remaining.committed()
    return tried, committed


# --- halving ---


def test_batch_without_a_bad_record_is_one_transaction_and_stays_in_columns() -> None:
    batch = batch_of(reading(), 1000)
    remaining = Remaining(batch)
    assert remaining.part() is batch
    remaining.committed()
    assert not remaining.part()
    assert batch.columns is not None


@pytest.mark.parametrize("bad", [0, 1, 2, 249, 499, 500, 501, 750, 998, 999, *range(11, 1000, 73)])
def test_one_bad_record_in_a_thousand_costs_a_dozen_transactions(bad: int) -> None:
    tried, committed = take_apart(batch_of(reading(), 1000), {bad})
    assert len(tried) <= DOZEN
    assert [bad] in tried
    assert [offset for part in committed for offset in part] == list(range(1000))


def test_what_comes_after_a_bad_record_that_was_found_stays_together() -> None:
    tried, _ = take_apart(batch_of(reading(), 8), {2})
    assert tried == [
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 2, 3],
        [0, 1],
        [2],  # one of two suspects
        [2, 3, 4, 5, 6, 7],
    ]


def test_last_suspect_left_is_tried_alone_before_it_is_blamed() -> None:
    tried, _ = take_apart(batch_of(reading(), 4), {3})
    assert tried == [[0, 1, 2, 3], [0, 1], [2], [3], [3]]


@pytest.mark.parametrize("bad", [{0, 1}, {0, 999}, {499, 500}, {3, 250, 251, 900}, set(range(100, 110))])
def test_each_of_several_bad_records_is_found_and_the_others_are_committed_in_order(bad: set[int]) -> None:
    tried, committed = take_apart(batch_of(reading(), 1000), bad)
    assert [offset for part in committed for offset in part] == list(range(1000))
    assert {part[0] for part in tried if len(part) == 1} >= bad
    assert len(tried) <= DOZEN * len(bad)


def test_all_records_bad_are_found_one_by_one() -> None:
    tried, committed = take_apart(batch_of(reading(), 16), set(range(16)))
    assert [offset for part in committed for offset in part] == list(range(16))
    assert len(tried) <= 16 * 6


def test_batch_of_one_needs_no_halving() -> None:
    remaining = Remaining(batch_of(reading(), 1, first=5))
    part = remaining.part()
    assert remaining.narrow() is part.rows[0]


# --- a bad record that is known ---


def test_known_culprit_ends_the_search_and_the_rest_is_tried_as_a_whole() -> None:
    remaining = Remaining(batch_of(reading(), 8))
    remaining.part()
    remaining.narrow()
    remaining.tries = 2
    assert offsets(remaining.part()) == [0, 1, 2, 3]
    remaining.found()
    assert (offsets(remaining.part()), remaining.tries) == (list(range(8)), 0)


# --- cuts ---


def test_cut_tries_no_further_than_to_the_record_and_then_goes_on_from_it() -> None:
    remaining = Remaining(batch_of(reading(), 8))
    remaining.part()
    remaining.cut(3)
    assert offsets(remaining.part()) == [0, 1, 2]
    remaining.committed()
    assert offsets(remaining.part()) == [3, 4, 5, 6, 7]


def test_cut_before_the_first_record_still_tries_one() -> None:
    remaining = Remaining(batch_of(reading(), 8))
    remaining.part()
    remaining.cut(0)
    assert offsets(remaining.part()) == [0]


def test_cut_does_not_widen_what_is_known_of_suspects() -> None:
    remaining = Remaining(batch_of(reading(), 8))
    remaining.part()
    remaining.narrow()
    remaining.part()
    remaining.cut(6)
    assert offsets(remaining.part()) == [0, 1, 2, 3]
    remaining.cut(1)
    assert offsets(remaining.part()) == [0]
    remaining.committed()
    assert offsets(remaining.part()) == [1, 2, 3], "half of the seven that are still under suspicion"


@pytest.mark.parametrize("end", ["narrow", "found", "leave"])
def test_cut_is_over_when_somebody_is_to_blame(end: str) -> None:
    remaining = Remaining(batch_of(reading(), 8))
    remaining.part()
    remaining.cut(5)
    remaining.part()
    match end:
        case "narrow":
            remaining.narrow()
            remaining.found()
        case "found":
            remaining.found()
        case "leave":
            remaining.leave(owned_partition(99))
    assert offsets(remaining.part()) == list(range(8))


# --- tries ---


def test_tries_are_counted_until_something_is_committed() -> None:
    remaining = Remaining(batch_of(reading(), 8))
    remaining.part()
    remaining.tries = 3
    remaining.narrow()
    remaining.part()
    assert remaining.tries == 3, "halves do not get their own: a batch would be tried for minutes"
    remaining.committed()
    assert remaining.tries == 0


# --- partitions that wait ---


def two_partitions() -> Batch:
    return Batch([span(reading(0), 0, 3), span(reading(1), 10, 4), span(reading(0), 20, 2)])


def places(part: Batch) -> list[tuple[int, int]]:
    return [(record.partition.number, record.message.offset) for record in part.as_rows()]


def test_partition_that_waits_leaves_and_the_others_go_on() -> None:
    remaining = Remaining(two_partitions())
    remaining.part()
    remaining.narrow()
    remaining.tries = 2
    remaining.leave(owned_partition(0))
    assert places(remaining.part()) == [(1, 10), (1, 11), (1, 12), (1, 13)]
    assert remaining.tries == 0


@pytest.mark.parametrize(
    ("offset", "kept"), [(0, []), (1, [0]), (3, [0, 1, 2]), (21, [0, 1, 2, 20]), (99, [0, 1, 2, 20, 21])]
)
def test_partition_that_waits_from_an_offset_on_keeps_what_comes_before(offset: int, kept: list[int]) -> None:
    remaining = Remaining(two_partitions())
    remaining.leave(owned_partition(0), offset)
    expected = [(number, at) for number, at in places(two_partitions()) if number == 1 or at in kept]
    assert places(remaining.part()) == expected


def test_batch_whose_only_partition_waits_is_done() -> None:
    remaining = Remaining(batch_of(reading(0), 8))
    remaining.leave(owned_partition(0))
    assert not remaining.part()


# --- records with a history ---


ACTS = replace(ONE, acts=True)


def with_history(count: int, *alone: int, acting: bool = False) -> Batch:
    """Records in a row; those at `alone` have a transaction of their own, because they act outside if `acting`."""
    rows = records_of(reading(), *range(count))
    for record in rows:
        record.alone = record.message.offset in alone
        if acting and record.alone:
            record.message_type = ACTS
    return Batch.of_rows(rows)


def parts(remaining: Remaining) -> Iterator[list[int]]:
    while part := remaining.part():
        yield offsets(part)
        remaining.committed()


@pytest.mark.parametrize(
    ("alone", "expected"),
    [
        ([0], [[0], [1, 2, 3, 4, 5]]),
        ([3], [[0, 1, 2], [3], [4, 5]]),
        ([5], [[0, 1, 2, 3, 4], [5]]),
        ([2, 3], [[0, 1], [2], [3], [4, 5]]),
        (range(6), [[0], [1], [2], [3], [4], [5]]),
    ],
)
def test_record_with_a_history_has_a_transaction_of_its_own(alone: Collection[int], expected: list[list[int]]) -> None:
    assert list(parts(Remaining(with_history(6, *alone), together=4))) == expected


@pytest.mark.parametrize(
    ("together", "expected"),
    [
        (1, [[0], [1], [2], [3], [4], [5, 6]]),
        (3, [[0, 1, 2], [3, 4], [5, 6]]),
        (100, [[0, 1, 2, 3, 4], [5, 6]]),
    ],
)
def test_records_that_act_outside_are_tried_as_many_at_a_time_as_handlers_may_run(
    together: int, expected: list[list[int]]
) -> None:
    batch = with_history(7, 0, 1, 2, 3, 4, acting=True)
    assert list(parts(Remaining(batch, together))) == expected


def test_usual_record_between_acting_ones_separates_them() -> None:
    batch = with_history(5, 0, 1, 3, 4, acting=True)
    assert list(parts(Remaining(batch, together=4))) == [[0, 1], [2], [3, 4]]


def test_acting_records_among_which_one_is_bad_are_halved_like_others() -> None:
    remaining = Remaining(with_history(8, *range(8), acting=True), together=4)
    assert offsets(remaining.part()) == [0, 1, 2, 3]
    remaining.narrow()
    assert offsets(remaining.part()) == [0, 1]
    remaining.committed()
    assert offsets(remaining.part()) == [2]


def test_record_that_became_known_to_have_a_history_is_cut_off_from_then_on() -> None:
    """As the claim of a batch finds it: a row of an earlier attempt is there."""
    batch = with_history(6)
    remaining = Remaining(batch)
    assert offsets(remaining.part()) == [0, 1, 2, 3, 4, 5]
    batch.as_rows()[4].alone = True
    remaining.cut(4)
    assert list(parts(remaining)) == [[0, 1, 2, 3], [4], [5]]


# --- what an error keeps alive ---


class Held:
    """Something that a frame has in a variable."""


def in_module(name: str, source: str) -> Callable[..., Any]:
    """The function `f` of a module of this name."""
    module: dict[str, Any] = {"__name__": name}
    exec(source, module)
    found: Callable[..., Any] = module["f"]
    return found


HOLD_AND_CALL = """
def f(make, calls):
    held = make()
    return calls.pop(0)(make, calls)
"""


def hold(*modules: str) -> tuple[ValueError, list[weakref.ref[Held]]]:
    """An error that came through a function in each of these, each of which had something in a variable."""
    seen: list[weakref.ref[Held]] = []

    def make() -> Held:
        held = Held()
        seen.append(weakref.ref(held))
        return held

    def fail(*_: object) -> None:
        raise ValueError("x")

    first, *others = [in_module(name, HOLD_AND_CALL) for name in modules]
    try:
        first(make, [*others, fail])
    except ValueError as error:
        return error, seen
    raise AssertionError


def alive(seen: list[weakref.ref[Held]]) -> list[bool]:
    gc.collect()
    return [one() is not None for one in seen]


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (["processor.engine.loop"], [False]),
        (["processor.engine.loop", "handlers.orders", "processor.handling.database"], [False, True, False]),
        (["processors.of.somebody", "asyncpg.connection"], [True, True]),
        # A context manager of ours is ours with what contextlib has of it, one of somebody else's is not.
        (["processor.postgres.session", "contextlib", "contextlib"], [False, False, False]),
        (["handlers.orders", "contextlib", "processor.postgres.session"], [True, True, False]),
    ],
)
def test_error_lets_go_of_what_our_own_functions_had_and_of_nothing_else(
    modules: list[str], expected: list[bool]
) -> None:
    error, seen = hold(*modules)
    assert alive(seen) == [True] * len(modules)
    let_go(error)
    assert alive(seen) == expected
    assert error.__traceback__ is not None, "people still see where it came from"


def test_error_lets_go_of_what_its_causes_had_too() -> None:
    first, held_by_first = hold("processor.kafka.producer")
    second, held_by_second = hold("processor.postgres.session")
    outer, held_by_outer = hold("processor.handling.run")
    caused_by(outer, second)
    second.__context__ = first
    first.__context__ = outer  # a circle, as errors that are raised again make them
    let_go(outer)
    assert alive([*held_by_first, *held_by_second, *held_by_outer]) == [False, False, False]


def test_function_that_is_still_running_is_left_alone() -> None:
    source = """
def f(held, let_go):
    try:
        raise ValueError("x")
    except ValueError as error:
        let_go(error)
    return held
"""
    held = Held()
    assert in_module("processor.engine.loop", source)(held, let_go) is held


def test_error_that_was_never_raised_has_nothing_to_let_go_of() -> None:
    let_go(ValueError("x"))
