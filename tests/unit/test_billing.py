"""The billing example: what each answer of the gateway means for the message."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from handlers import billing
from processor import Message, Output, Reject, Retry, Unavailable


class Gateway(BaseHTTPRequestHandler):
    status = 201
    headers_out: ClassVar[dict[str, str]] = {}
    calls: ClassVar[list[tuple[str, str | None, Any]]] = []

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.calls.append((self.path, self.headers["Idempotency-Key"], json.loads(body)))
        answer = json.dumps({"id": "ch_1", "why": "card declined"}).encode()
        self.send_response(self.status)
        for name, value in self.headers_out.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def gateway(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Gateway]]:
    class Fresh(Gateway):
        calls: ClassVar[list[tuple[str, str | None, Any]]] = []

    server = ThreadingHTTPServer(("127.0.0.1", 0), Fresh)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    monkeypatch.setenv(billing.GATEWAY_VARIABLE, f"http://127.0.0.1:{server.server_port}/v1/")
    yield Fresh
    server.shutdown()
    server.server_close()
    thread.join()


class Rows:
    def __init__(self) -> None:
        self.inserted: list[tuple[str, dict[str, Any]]] = []

    def insert(self, table: str, **row: Any) -> None:
        self.inserted.append((table, row))


def due() -> Message[billing.PaymentDue]:
    value = billing.PaymentDue(payment_id="p-1", customer="c-1", amount_cents=1250)
    return Message("id-1", "PaymentDue", None, value, (), "payments-due", 0, 0, None)


async def charge(db: Rows) -> Output:
    return await billing.charge(due(), db)  # type: ignore[arg-type]


async def test_a_charge_is_made_under_the_message_s_id_and_booked(gateway: type[Gateway]) -> None:
    db = Rows()
    wanted = {"payment_id": "p-1", "customer": "c-1", "amount_cents": 1250}
    output = await charge(db)
    assert gateway.calls == [("/v1/charges", "id-1", wanted)]
    assert db.inserted == [("charges", {**wanted, "message_id": "id-1", "gateway_id": "ch_1"})]
    assert (output.topic, output.key, output.type) == ("charges-made", "c-1", "ChargeMade")
    assert output.value == {**wanted, "gateway_id": "ch_1"}


@pytest.mark.parametrize(
    ("status", "raised"),
    [
        (402, Reject),
        (422, Reject),
        (409, Retry),
        (500, Retry),
        (502, Retry),
        (429, Unavailable),
        (503, Unavailable),
        (401, RuntimeError),
    ],
)
async def test_what_is_no_charge_is_told_apart_by_its_status(
    gateway: type[Gateway], status: int, raised: type[Exception]
) -> None:
    gateway.status = status
    db = Rows()
    with pytest.raises(raised, match=f"payment p-1: the gateway answered {status}"):
        await charge(db)
    assert db.inserted == []


@pytest.mark.parametrize(("header", "after"), [("7", 7.0), ("Wed, 21 Oct 2026 07:28:00 GMT", None)])
async def test_a_gateway_that_names_its_time_is_left_alone_until_then(
    gateway: type[Gateway], header: str, after: float | None
) -> None:
    gateway.status = 503
    gateway.headers_out = {"Retry-After": header}
    with pytest.raises(Unavailable) as caught:
        await charge(Rows())
    assert caught.value.after == after


async def test_a_gateway_that_is_not_there_is_an_outage(
    gateway: type[Gateway], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(billing.GATEWAY_VARIABLE, "http://127.0.0.1:1")
    with pytest.raises(Unavailable, match="cannot be reached"):
        await charge(Rows())
    assert gateway.calls == []
