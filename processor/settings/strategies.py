"""The strategies that `message.id` and `message.type` are chains of: which exist, and how each is written."""

from __future__ import annotations

import difflib
import re


def checked(chain: tuple[str, ...], valid: tuple[str, ...], always: str) -> tuple[str, ...]:
    if not chain:
        raise ValueError("names no strategy")
    for strategy in chain:
        _check_strategy(strategy, valid)
    for strategy in chain[:-1]:
        if strategy.startswith(always):
            raise ValueError(f"{strategy} always yields, so the strategies after it are never used")
    return chain


def _check_strategy(strategy: str, valid: tuple[str, ...]) -> None:
    kind, colon, rest = strategy.partition(":")
    kinds = {name.partition(":")[0]: name for name in valid}
    if kind not in kinds or bool(colon) != (":" in kinds[kind]):
        near = difflib.get_close_matches(kind, kinds, n=1, cutoff=0.5)
        hint = f"did you mean {kinds[near[0]]}" if near else f"valid: {', '.join(valid)}"
        raise ValueError(f"unknown strategy {strategy!r}; {hint}{'?' if near else ''}")
    if kind in ("header", "constant") and not rest:
        raise ValueError(f"{strategy!r} lacks a name, as in {kind}:NAME")
    if kind == "payload" and (not rest.startswith("/") or re.search(r"~(?![01])", rest)):
        raise ValueError(f"{strategy!r} is not a JSON pointer, as in payload:/order/id (~ is written ~0, / is ~1)")
    if kind == "business":
        _check_template(strategy, rest)


def _check_template(strategy: str, template: str) -> None:
    fields = re.findall(r"\{([^{}]*)\}", template)
    if re.search(r"[{}]", re.sub(r"\{[^{}]*\}", "", template)):
        raise ValueError(f"{strategy!r} has unbalanced braces")
    if not fields:
        raise ValueError(f"{strategy!r} names no field, as in business:order:{{order_id}}")
    for name in fields:
        if not re.fullmatch(r"[^\W\d][\w.-]*", name):
            raise ValueError(f"{strategy!r} has a field that is not a plain name, as in {{order_id}}")
