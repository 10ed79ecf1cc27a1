"""Billing: charge customers through a payment gateway. The example of a handler that acts outside the database.

The handler runs outside any transaction, and may run again for a message whose charge was made, as after a crash.
That is why every call carries the message's id: the gateway answers a known key with the charge that it made
then. Only writes queued on `db` and returned outputs are exactly once by the processor's own means.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import BaseModel, Field

from processor import Database, Message, Output, Reject, Retry, Unavailable

RESULTS = "charges-made"
GATEWAY_VARIABLE = "BILLING_GATEWAY_URL"
GATEWAY = "http://localhost:8800"
# Well below the handler's time-out, because a call on a thread cannot be cancelled.
ANSWER_SECONDS = 10.0

# Not asyncio's default threads: the processor uses these too, and a gateway that hangs must not block it.
_calls = ThreadPoolExecutor(max_workers=64, thread_name_prefix="gateway")


class PaymentDue(BaseModel):
    payment_id: str
    customer: str
    amount_cents: Annotated[int, Field(gt=0, lt=2**63)]


class Charge(BaseModel):
    """The gateway's answer about a charge that it made, now or at an earlier call."""

    id: str


class Answer(NamedTuple):
    status: int
    body: bytes
    retry_after: str | None


async def charge(message: Message[PaymentDue], db: Database) -> Output:
    """Charge the customer, book the charge, and report it; a message whose charge is refused fails."""
    due = message.value
    wanted = {"payment_id": due.payment_id, "customer": due.customer, "amount_cents": due.amount_cents}
    try:
        answer = await asyncio.get_running_loop().run_in_executor(_calls, _post, json.dumps(wanted), message.id)
    except (OSError, http.client.HTTPException) as error:
        raise Unavailable(f"the gateway cannot be reached: {type(error).__name__}: {error}") from error
    made = _understood(answer, due)
    db.insert("charges", message_id=message.id, gateway_id=made.id, **wanted)
    return Output(RESULTS, {**wanted, "gateway_id": made.id}, key=due.customer, type="ChargeMade")


def _post(body: str, idempotency_key: str) -> Answer:
    url = urlsplit(os.environ.get(GATEWAY_VARIABLE, GATEWAY))
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.netloc, timeout=ANSWER_SECONDS)
    try:
        headers = {"Content-Type": "application/json", "Idempotency-Key": idempotency_key}
        connection.request("POST", f"{url.path.rstrip('/')}/charges", body, headers)
        response = connection.getresponse()
        return Answer(response.status, response.read(), response.headers.get("Retry-After"))
    finally:
        connection.close()


def _understood(answer: Answer, due: PaymentDue) -> Charge:
    what = f"payment {due.payment_id}: the gateway answered {answer.status}"
    match answer.status:
        case 200 | 201:
            return Charge.model_validate_json(answer.body)
        case 402 | 422:
            raise Reject(f"{what}: {answer.body[:200].decode(errors='replace')}")
        case 429 | 503:
            raise Unavailable(what, after=_seconds(answer.retry_after))
        case 409:  # an earlier call with this key, perhaps from a process that died, has not ended yet
            raise Retry(what)
        case status if status >= 500:
            raise Retry(what)
        case _:  # credentials, address, protocol: our mistake, which a person has to correct
            raise RuntimeError(what)


def _seconds(retry_after: str | None) -> float | None:
    """Return the header's seconds. It may hold a date instead: then the processor's own backoff applies."""
    return float(retry_after) if retry_after is not None and retry_after.isdecimal() else None
