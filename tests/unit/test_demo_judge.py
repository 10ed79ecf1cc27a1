"""The demo's judge must see what it is there to see; its feed must contain what it claims."""

from __future__ import annotations

import ast
import json
import random
from collections import Counter
from pathlib import Path

import pytest

from demo import orders, verify
from demo.summary import BETWEEN, Kill, Summary
from demo.verify import Answer, Order, Verdict

ORDER = Order("sku-1", 2)
RESERVED = Answer("OrderReserved", "a", ORDER)
REJECTED = Answer("OrderRejected", "a", ORDER)
STOCK = {"sku-1": (10, 2)}
ROW = {"o": [ORDER]}


def judge(
    answers: list[Answer],
    rows: dict[str, list[Order]],
    stock: dict[str, tuple[int, int]] = STOCK,
) -> Verdict:
    return verify.judge(Verdict(records=1), {"o": ORDER}, {"o": answers} if answers else {}, rows, stock)


def test_one_answer_and_one_row_is_exactly_once() -> None:
    verdict = judge([RESERVED], ROW)
    assert verdict.ok
    assert (verdict.outputs, verdict.rows, verdict.duplicates) == (1, 1, 0)


def test_an_order_without_answer_is_lost() -> None:
    assert judge([], {}, {"sku-1": (10, 0)}).lost == 1
    assert judge([], ROW).lost == 1


def test_a_reservation_without_row_is_lost() -> None:
    assert judge([RESERVED], {}, {"sku-1": (10, 0)}).lost == 1


def test_a_second_answer_or_row_is_doubled() -> None:
    assert judge([RESERVED, RESERVED._replace(message_id="b")], ROW).doubled == 1
    assert judge([RESERVED], {"o": [ORDER, ORDER]}, {"sku-1": (10, 4)}).doubled == 1


@pytest.mark.parametrize(
    ("answers", "rows", "stock", "complaint"),
    [
        ([RESERVED, RESERVED], ROW, STOCK, "message-id"),
        ([REJECTED], ROW, STOCK, "rejected and has a row"),
        ([REJECTED], {}, {"sku-1": (10, 0)}, "although"),
        ([RESERVED], {"o": [ORDER], "p": [ORDER]}, {"sku-1": (10, 4)}, "never placed"),
        ([RESERVED], ROW, {"sku-1": (10, 5)}, "add up"),
        ([RESERVED], ROW, {"sku-1": (1, 2)}, "oversold"),
        ([RESERVED._replace(order=Order("sku-1", 3))], ROW, STOCK, "another sku or quantity"),
        ([RESERVED._replace(type="Other")], {}, {"sku-1": (1, 0)}, "type 'Other'"),
    ],
)
def test_what_does_not_add_up_is_told(
    answers: list[Answer], rows: dict[str, list[Order]], stock: dict[str, tuple[int, int]], complaint: str
) -> None:
    verdict = judge(answers, rows, stock)
    assert not verdict.ok
    assert any(complaint in line for line in verdict.wrong), verdict.wrong


def test_the_judge_shares_no_code_with_the_accused() -> None:
    tree = ast.parse(Path(verify.__file__).read_text())
    imported = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not [name for name in imported if name.partition(".")[0] in ("processor", "handlers", "tests", "demo")]


def test_every_order_is_fed_and_some_are_repeated_byte_for_byte() -> None:
    feed = orders.records(5000, "run", 6, random.Random(1))
    by_key: dict[str, set[bytes]] = {}
    for sent in feed:
        by_key.setdefault(sent.key, set()).add(sent.value)
    assert len(by_key) == 5000
    assert all(len(values) == 1 for values in by_key.values())
    assert 150 < len(feed) - 5000 < 350
    assert any(sent.partition != orders.ANYWHERE for sent in feed)
    wanted: Counter[str] = Counter()
    for (value,) in by_key.values():
        order = json.loads(value)
        wanted[order["sku"]] += order["quantity"]
    stock = dict(orders.stock())
    assert wanted.keys() <= stock.keys()
    assert any(quantity > stock[sku] for sku, quantity in wanted.items()), "some stock has to run out"


def test_the_summary_names_a_failure() -> None:
    good = Summary(Verdict(records=3, orders=2, outputs=2, reserved=2, rows=2), [Kill(BETWEEN, 2, 1, 1)], 9.6)
    assert good.verdict_line() == "exactly once: nothing lost, nothing doubled, in 10 s"
    assert ("duplicates", "1") in [line[:2] for line in good.lines()]
    assert good.as_json()["kills"][0]["unsent"] == 1
    bad = Summary(Verdict(lost=1, wrong=["sku-1 is oversold"]), [], 1)
    assert bad.verdict_line() == "NOT exactly once"
    assert bad.lines()[-1] == ("wrong", "!", "sku-1 is oversold")
    assert bad.as_json()["ok"] is False
