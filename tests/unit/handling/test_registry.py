"""What handlers return: who is answered by what, in which order, and what is no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from processor import Message, Output, Outputs, Result
from processor.handling.registry import given_for_batch, given_for_one


def message(offset: int) -> Message[Any]:
    return Message(f"m{offset}", "T", None, {}, (), "orders", 0, offset, None)


def told(messages: list[Message[Any]], value: Any) -> tuple[list[tuple[str, str, int]], dict[str, Any]]:
    """(output, message it answers, place among its answers) of each, and the results."""
    given = given_for_batch("handlers:f", messages, value)
    outputs = [
        (output.topic, messages[index].id, place)
        for output, index, place in zip(given.outputs, given.where, given.places, strict=True)
    ]
    return outputs, {messages[index].id: result for index, result in given.results}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, ([], None)),
        (Output("a", 1), (["a"], None)),
        ([], ([], None)),
        ([Output("a", 1), Output("b", 1)], (["a", "b"], None)),
        ((Output("a", 1),), (["a"], None)),
        (Result(5), ([], 5)),
        (Result(0), ([], 0)),
        (Result(None), ([], None)),
        (Result({"x": 1}, [Output("a", 1)]), (["a"], {"x": 1})),
    ],
)
def test_handler_of_one_message_may_return(value: Any, expected: Any) -> None:
    outputs, result = given_for_one("handlers:f", value)
    assert ([output.topic for output in outputs], result) == expected


def test_list_with_anything_but_outputs_is_refused() -> None:
    with pytest.raises(TypeError, match="a list with a dict in it"):
        given_for_one("handlers:f", [Output("a", 1), {}])


@pytest.mark.parametrize("value", [{"plain": "value"}, 5, "text", True, 0, "", Path("x")])
def test_value_that_is_no_output_is_refused_with_the_way_to_keep_it(value: Any) -> None:
    with pytest.raises(TypeError, match=r"returned an? \w+; return an Output, a list of them, or Result\(value\)"):
        given_for_one("handlers:f", value)


@pytest.mark.parametrize("outputs", [Output("a", 1), [{"a": 1}], "text"])
def test_result_whose_outputs_are_no_list_of_outputs_is_refused(outputs: Any) -> None:
    cause = message(1)
    with pytest.raises(TypeError, match=r"a Result with an? .* outputs; they are a list of Output"):
        given_for_one("handlers:f", Result(5, outputs))
    with pytest.raises(TypeError, match=r"a Result with an? .* outputs; they are a list of Output"):
        given_for_batch("handlers:f", [cause], [Result(5, outputs, cause=cause)])


def test_what_is_refused_is_named_in_plain_english() -> None:
    with pytest.raises(TypeError, match="returned a Result without a message"):
        given_for_batch("handlers:f", [message(1)], [Result(1)])
    with pytest.raises(TypeError, match="returned an Output without a message"):
        given_for_batch("handlers:f", [message(1)], [Output("a", 1)])


def test_answers_by_the_column_are_for_batches() -> None:
    with pytest.raises(TypeError, match="answer a batch"):
        given_for_one("handlers:f", Outputs("a", [1]))


def test_answers_of_a_batch_are_put_in_the_order_of_their_causes() -> None:
    one, two, three = messages = [message(n) for n in (1, 2, 3)]
    value = [
        Output("a", 1, cause=three),
        Output("b", 1, cause=one),
        Result("x", [Output("c", 1), Output("d", 1)], cause=three),
        Output("e", 1, cause=one),
        Result("y", cause=two),
    ]
    outputs, results = told(messages, value)
    assert outputs == [("b", "m1", 0), ("e", "m1", 1), ("a", "m3", 0), ("c", "m3", 1), ("d", "m3", 2)]
    assert results == {"m3": "x", "m2": "y"}


def test_one_answer_for_each_is_the_same_in_any_order() -> None:
    messages = [message(n) for n in range(5)]
    value = [Output(f"to{n}", 1, cause=cause) for n, cause in enumerate(messages)]
    expected = [(f"to{n}", f"m{n}", 0) for n in range(5)]
    assert told(messages, value) == (expected, {})
    assert told(messages, value[::-1]) == (expected, {})
    assert told(messages, tuple(value)) == (expected, {})


def test_as_many_answers_as_messages_need_not_be_one_for_each() -> None:
    messages = [message(n) for n in range(3)]
    value = [Output(f"to{n}", 1, cause=messages[1]) for n in range(3)]
    assert told(messages, value)[0] == [("to0", "m1", 0), ("to1", "m1", 1), ("to2", "m1", 2)]


@pytest.mark.parametrize("value", [[Output("a", 1)], Output("a", 1, cause=message(9)), [Result(1)]])
def test_answer_without_a_message_of_the_batch_as_cause_is_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cause=message"):
        given_for_batch("handlers:f", [message(1)], value)


@pytest.mark.parametrize("value", [5, {"a": 1}, ["text"], [None]])
def test_batch_handler_returns_nothing_but_outputs_and_results(value: Any) -> None:
    with pytest.raises(TypeError, match="a batch handler returns Outputs"):
        given_for_batch("handlers:f", [message(1)], value)
