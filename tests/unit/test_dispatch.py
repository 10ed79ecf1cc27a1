"""What handlers return: who is answered by what, in which order, and what is no answer."""

from __future__ import annotations

from typing import Any

import pytest

from processor import Message, Output, Result
from processor.consumer import Assignment
from processor.dispatch import Given, given_for_batch, given_for_one
from processor.records import Partition, Record

ASSIGNMENT = Assignment(Partition("orders", 0))


def record(offset: int) -> Record:
    message: Message[Any] = Message(f"m{offset}", "T", None, {}, (), "orders", 0, offset, None)
    return Record(message, bytes(16), b"", 0, 0, None, True, None, ASSIGNMENT)


def told(given: Given) -> tuple[list[tuple[str, str, int]], dict[str, Any]]:
    """(output, message it answers, place among its answers) of each, and the results."""
    outputs = [
        (output.topic, cause.message.id, place)
        for output, cause, place in zip(given.outputs, given.causes, given.places, strict=True)
    ]
    return outputs, {record.message.id: result for record, result in given.results}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ([], {})),
        (Output("a", 1), ([("a", "m1", 0)], {})),
        ([], ([], {})),
        ([Output("a", 1), Output("b", 1)], ([("a", "m1", 0), ("b", "m1", 1)], {})),
        ((Output("a", 1),), ([("a", "m1", 0)], {})),
        (Result(5), ([], {"m1": 5})),
        (Result(0), ([], {"m1": 0})),
        (Result(None), ([], {})),
        (Result({"x": 1}, [Output("a", 1)]), ([("a", "m1", 0)], {"m1": {"x": 1}})),
        ({"plain": "value"}, ([], {"m1": {"plain": "value"}})),
    ],
)
def test_handler_of_one_message_may_return(value: Any, expected: Any) -> None:
    assert told(given_for_one(record(1), value)) == expected


def test_list_with_anything_but_outputs_is_refused() -> None:
    with pytest.raises(TypeError, match="a list with a dict in it"):
        given_for_one(record(1), [Output("a", 1), {}])


def test_answers_of_a_batch_are_put_in_the_order_of_their_causes() -> None:
    one, two, three = records = [record(n) for n in (1, 2, 3)]
    value = [
        Output("a", 1, cause=three.message),
        Output("b", 1, cause=one.message),
        Result("x", [Output("c", 1), Output("d", 1)], cause=three.message),
        Output("e", 1, cause=one.message),
        Result("y", cause=two.message),
    ]
    outputs, results = told(given_for_batch(records, value))
    assert outputs == [("b", "m1", 0), ("e", "m1", 1), ("a", "m3", 0), ("c", "m3", 1), ("d", "m3", 2)]
    assert results == {"m3": "x", "m2": "y"}


def test_one_answer_for_each_is_the_same_in_any_order() -> None:
    records = [record(n) for n in range(5)]
    value = [Output(f"to{n}", 1, cause=record.message) for n, record in enumerate(records)]
    expected = [(f"to{n}", f"m{n}", 0) for n in range(5)]
    assert told(given_for_batch(records, value)) == (expected, {})
    assert told(given_for_batch(records, value[::-1])) == (expected, {})
    assert told(given_for_batch(records, tuple(value))) == (expected, {})


def test_as_many_answers_as_messages_need_not_be_one_for_each() -> None:
    records = [record(n) for n in range(3)]
    value = [Output(f"to{n}", 1, cause=records[1].message) for n in range(3)]
    assert told(given_for_batch(records, value))[0] == [("to0", "m1", 0), ("to1", "m1", 1), ("to2", "m1", 2)]


@pytest.mark.parametrize("value", [[Output("a", 1)], Output("a", 1, cause=record(9).message), [Result(1)]])
def test_answer_without_a_message_of_the_batch_as_cause_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cause=message"):
        given_for_batch([record(1)], value)


@pytest.mark.parametrize("value", [5, {"a": 1}, ["text"], [None]])
def test_batch_handler_returns_nothing_but_outputs_and_results(value: Any) -> None:
    with pytest.raises(TypeError, match="a batch handler returns Outputs"):
        given_for_batch([record(1)], value)
