"""A payment gateway as there are many: `POST /charges` with an `Idempotency-Key`, over HTTP on loopback.

A key that was charged before gets the same charge again instead of a second one. Every call is on record,
answered or not, so that a test can tell how often it was asked from how often it charged.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self

from tests.support.waiting import eventually

WAIT_SECONDS = 60.0


@dataclass(frozen=True)
class Call:
    key: str | None
    body: Any
    at: datetime


class Gateway:
    """Charges unless it is told otherwise; `with Gateway() as gateway:` serves until the block ends."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.charges: dict[str, dict[str, Any]] = {}  # by key
        self._lock = threading.Lock()
        self._answer = HTTPStatus.OK
        self._open = threading.Event()
        self._open.set()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="gateway")

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @contextmanager
    def answering(self, status: HTTPStatus) -> Iterator[None]:
        """Charge nothing and answer so: PAYMENT_REQUIRED, INTERNAL_SERVER_ERROR, SERVICE_UNAVAILABLE."""
        self._answer = status
        try:
            yield
        finally:
            self._answer = HTTPStatus.OK

    @contextmanager
    def blocked(self) -> Iterator[None]:
        """Charge, but keep the answer until the block ends."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def wait_for_calls(self, number: int, seconds: float = 30.0) -> None:
        eventually(lambda: len(self.calls) >= number, seconds, lambda: f"{number} calls, there are {len(self.calls)}")

    def charge(self, key: str | None, body: Any) -> tuple[HTTPStatus, dict[str, Any]]:
        with self._lock:
            self.calls.append(Call(key, body, datetime.now(UTC)))
            if self._answer is not HTTPStatus.OK:
                return self._answer, {"error": self._answer.phrase}
            if key is None:
                return HTTPStatus.BAD_REQUEST, {"error": "no Idempotency-Key"}
            known = self.charges.get(key)
            if known is not None:
                if known["request"] != body:
                    return HTTPStatus.CONFLICT, {"error": "the key was used for another charge"}
                return HTTPStatus.OK, _public(known)
            made = self.charges[key] = {"id": f"ch-{len(self.charges) + 1}", "status": "succeeded", "request": body}
            return HTTPStatus.CREATED, _public(made)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                if self.path != "/charges":
                    status, answer = HTTPStatus.NOT_FOUND, {"error": self.path}
                else:
                    status, answer = gateway.charge(self.headers.get("Idempotency-Key"), body)
                gateway._open.wait(WAIT_SECONDS)
                self._send(status, json.dumps(answer).encode())

            def _send(self, status: HTTPStatus, body: bytes) -> None:
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)
                except OSError:  # whoever asked was killed meanwhile
                    self.close_connection = True

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name for it
                """Not to the test's stderr: `calls` is the log."""

        return Handler


def _public(charge: dict[str, Any]) -> dict[str, Any]:
    return {"id": charge["id"], "status": charge["status"], **(charge["request"] or {})}
