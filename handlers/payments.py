"""Payments: a double-entry ledger. Money is numeric in Postgres and Decimal here, never a float."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, Field

from processor import Database, Message, Output, Reject, Result

RESULTS = "transfers"

Amount = Annotated[Decimal, Field(gt=0, max_digits=20, decimal_places=2)]


class TransferRequested(BaseModel):
    transfer_id: str
    debit: str
    credit: str
    amount: Amount


class TransferReversed(BaseModel):
    transfer_id: str


async def transfer(message: Message[TransferRequested], db: Database) -> Result:
    """Book both sides of a transfer; the booking is kept as the message's result."""
    request = message.value
    if request.debit == request.credit:
        raise Reject(f"transfer {request.transfer_id}: debit and credit are the same account")
    await _book(db, request.transfer_id, request.debit, request.credit, request.amount, "transfer")
    booked = {"transfer_id": request.transfer_id, "amount": request.amount}
    return Result(booked, [Output(RESULTS, booked, key=request.transfer_id, type="TransferBooked")])


async def reverse(message: Message[TransferReversed], db: Database) -> Output:
    """Book the same amount back; a transfer that was never booked cannot be reversed."""
    transfer_id = message.value.transfer_id
    sides = await db.fetch(
        "SELECT account, amount FROM entries WHERE transfer_id = $1 AND kind = 'transfer' ORDER BY amount", transfer_id
    )
    if not sides:
        raise Reject(f"transfer {transfer_id}: nothing to reverse")
    debited, credited = sides
    await _book(db, transfer_id, credited["account"], debited["account"], credited["amount"], "reversal")
    return Output(RESULTS, {"transfer_id": transfer_id}, key=transfer_id, type="TransferReversed")


async def _book(db: Database, transfer_id: str, debit: str, credit: str, amount: Decimal, kind: str) -> None:
    sides = sorted(((debit, -amount), (credit, amount)))  # one lock order for all transfers
    for account, change in sides:
        await db.execute(
            "INSERT INTO accounts (account, balance) VALUES ($1, $2)"
            " ON CONFLICT (account) DO UPDATE SET balance = accounts.balance + excluded.balance",
            account,
            change,
        )
        db.write(
            "INSERT INTO entries (transfer_id, account, amount, kind) VALUES ($1, $2, $3, $4)",
            transfer_id,
            account,
            change,
            kind,
        )
