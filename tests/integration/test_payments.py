"""The payments example: money moves once, to the cent, however often it is asked for and whoever moves it at once."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from handlers import payments
from tests.integration.conftest import MakeBench
from tests.support.bench import Bench, Sent

HANDLERS = {
    "TransferRequested": "handlers.payments:transfer",
    "TransferReversed": "handlers.payments:reverse",
}


@pytest.fixture
def ledger(bench: MakeBench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = bench(HANDLERS, partitions=2, message={"id": ["payload:/request_id"]}, batch={"max_messages": 50})
    monkeypatch.setattr(payments, "RESULTS", made.output)
    return made


def transfer(number: int, debit: str, credit: str, amount: str | float, partition: int = 0) -> Sent:
    value = {
        "request_id": f"r{number}",
        "transfer_id": f"t{number}",
        "debit": debit,
        "credit": credit,
        "amount": amount,
    }
    return Sent(value, f"t{number}".encode(), "TransferRequested", partition=partition)


def reversal(number: int, partition: int = 0) -> Sent:
    return Sent(
        {"request_id": f"v{number}", "transfer_id": f"t{number}"},
        f"t{number}".encode(),
        "TransferReversed",
        partition=partition,
    )


async def balances(bench: Bench) -> dict[str, Decimal]:
    return {row["account"]: row["balance"] for row in await bench.rows("SELECT * FROM accounts")}


async def test_repeated_requests_book_once_and_both_sides_always_add_up_to_zero(ledger: Bench) -> None:
    wanted = [transfer(n, f"a{n % 3}", f"b{n % 2}", "10.01", partition=n % 2) for n in range(60)]
    ledger.send(wanted + wanted[:30] + [transfer(n, f"a{n % 3}", f"b{n % 2}", "10.01", (n + 1) % 2) for n in range(30)])
    async with ledger.running(engines=2):
        await ledger.done()
    rows = await ledger.rows("SELECT transfer_id, count(*), sum(amount) FROM entries GROUP BY 1")
    assert len(rows) == 60
    assert {(row["count"], row["sum"]) for row in rows} == {(2, Decimal(0))}
    found = await balances(ledger)
    assert sum(found.values()) == 0
    assert found["b0"] + found["b1"] == Decimal("600.60")
    booked = [value["transfer_id"] for _, value, _ in ledger.outputs()]
    assert sorted(booked) == sorted(f"t{n}" for n in range(60))


async def test_amount_is_kept_to_the_last_digit_as_text_and_as_number(ledger: Bench) -> None:
    ledger.send([transfer(1, "a", "b", "123456789012345678.91")])
    raw = json.dumps(transfer(2, "a", "c", "AMOUNT").value).replace('"AMOUNT"', "123456789012345678.91").encode()
    ledger.send([Sent(raw, b"t2", "TransferRequested")])
    await ledger.run_until_done()
    found = await balances(ledger)
    assert found["b"] == found["c"] == Decimal("123456789012345678.91")
    assert found["a"] == Decimal("-246913578024691357.82")
    result = (await ledger.inbox())["r1"]["result"]
    assert json.loads(result) == {"transfer_id": "t1", "amount": "123456789012345678.91"}


async def test_reversal_books_the_money_back_once(ledger: Bench) -> None:
    ledger.send([transfer(1, "a", "b", "5.00"), reversal(1), reversal(1)])
    await ledger.run_until_done()
    assert set((await balances(ledger)).values()) == {Decimal("0.00")}
    assert len(await ledger.rows("SELECT FROM entries")) == 4


@pytest.mark.parametrize(
    "bad",
    [
        transfer(9, "a", "a", "1.00"),
        transfer(9, "a", "b", "-1.00"),
        transfer(9, "a", "b", "0.001"),
        transfer(9, "a", "b", "NaN"),
        reversal(9),
    ],
)
async def test_request_that_makes_no_sense_fails_and_moves_nothing(ledger: Bench, bad: Sent) -> None:
    ledger.send([transfer(1, "a", "b", "5.00"), bad, transfer(2, "a", "b", "5.00")])
    await ledger.run_until_done()
    assert await balances(ledger) == {"a": Decimal("-10.00"), "b": Decimal("10.00")}
    assert [row["status"] for row in (await ledger.inbox()).values()] == ["completed", "failed", "completed"]
