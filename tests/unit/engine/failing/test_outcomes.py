"""The loop has an answer to every outcome, and reads the right facts from it."""

from __future__ import annotations

import ast
import inspect
import textwrap
from typing import get_args

import pytest

from processor.engine.failing import outcomes
from processor.engine.failing.outcomes import Outcome
from processor.engine.loop import Loop


def patterns() -> dict[str, list[str | None]]:
    """The outcomes that the loop matches on, and under which names it takes what is in them, by position."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(Loop._process)))
    found: dict[str, list[str | None]] = {}
    for case in ast.walk(tree):
        if not isinstance(case, ast.match_case):
            continue
        pattern = case.pattern
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is not None:
            pattern = pattern.pattern
        assert isinstance(pattern, ast.MatchClass), ast.dump(pattern)
        assert case.guard is None
        assert isinstance(pattern.cls, ast.Name)
        assert pattern.cls.id not in found
        found[pattern.cls.id] = [one.name for one in pattern.patterns if isinstance(one, ast.MatchAs)]
    return found


def test_loop_has_a_case_for_every_outcome_and_for_nothing_else() -> None:
    """One without a case would be tried again at once, for ever."""
    assert sorted(patterns()) == sorted(outcome.__name__ for outcome in get_args(Outcome))


@pytest.mark.parametrize("name", [outcome.__name__ for outcome in get_args(Outcome)])
def test_fields_that_the_loop_takes_by_position_are_those_that_it_means(name: str) -> None:
    taken = patterns()[name]
    fields = getattr(outcomes, name).__match_args__
    assert tuple(taken) == fields[: len(taken)]
