"""A TCP proxy that passes everything on, until it is told to lose an answer or a request.

It reads just enough of a protocol to tell one request from another: whole frames from the client, and what
kind each is. Whether the server got the request before the connection broke is decided by the test, which
is the difference between "committed, but the client cannot know" and "never happened".
"""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field

CHUNK = 65536
LOOPBACK = "127.0.0.1"

# Takes the bytes received so far; returns the size of the first whole frame in them, or None if it is not whole.
Framing = Callable[[bytes, int], int | None]


def postgres_frame(data: bytes, number: int) -> int | None:
    """The first message of a connection has no type byte in front of its length. Without TLS."""
    at = 0 if number == 0 else 1
    if len(data) < at + 4:
        return None
    size = at + int(struct.unpack_from(">i", data, at)[0])
    return size if len(data) >= size else None


def kafka_frame(data: bytes, _number: int) -> int | None:
    if len(data) < 4:
        return None
    size = 4 + int(struct.unpack_from(">i", data)[0])
    return size if len(data) >= size else None


def is_postgres_commit(frame: bytes) -> bool:
    """A simple query that begins with COMMIT."""
    return frame[:1] == b"Q" and frame[5:].startswith(b"COMMIT")


def asks_for_offsets(frame: bytes, client_id: str) -> bool:
    """Kafka's ListOffsets request of this client: where does the log begin or end?"""
    key, _version, _correlation, size = struct.unpack_from(">hhih", frame, 4)
    return bool(key == 2 and frame[14 : 14 + size] == client_id.encode())


def is_end_of_transaction(frame: bytes) -> bool:
    """Kafka's EndTxn request: commit or abort."""
    return bool(struct.unpack_from(">h", frame, 4)[0] == 26)


@dataclass
class Trap:
    """The request to wait for, and what becomes of it."""

    matches: Callable[[bytes], bool]
    forward: bool
    passes_left: int


@dataclass(eq=False)
class Connection:
    client: socket.socket
    server: socket.socket
    doomed: threading.Event = field(default_factory=threading.Event)
    held: set[bytes] = field(default_factory=set)  # correlation ids of requests whose answers are to wait
    sending: threading.Lock = field(default_factory=threading.Lock)

    def answer(self, data: bytes) -> None:
        with self.sending:
            self.client.sendall(data)


class Proxy:
    """Listens on `port` and connects each client to the target."""

    def __init__(self, framing: Framing, target_port: int | None = None) -> None:
        self.target_port = target_port
        self.sprung = threading.Event()  # a connection was cut
        self._framing = framing
        self._trap: Trap | None = None
        self._hold: Callable[[bytes], bool] | None = None
        self._kept: list[tuple[Connection, bytes]] = []
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def cut_at(self, matches: Callable[[bytes], bool], *, forward: bool, number: int = 1) -> None:
        """Break the connection at the n-th such request from now on.

        `forward`: the server gets it and does it, its answer is lost. Otherwise the server never sees it.
        """
        self.sprung.clear()
        with self._lock:
            self._trap = Trap(matches, forward, number)

    def hold(self, matches: Callable[[bytes], bool]) -> None:
        """Keep back the answers to such requests of Kafka clients, and only those, until `release`."""
        with self._lock:
            self._hold = matches

    def release(self) -> int:
        """Deliver what was kept back; returns how many answers that were."""
        with self._lock:
            self._hold = None
            kept, self._kept = self._kept, []
        for connection, answer in kept:
            with suppress(OSError):
                connection.answer(answer)
        return len(kept)

    def close(self) -> None:
        with self._lock:
            sockets = [self._listener, *self._sockets]
        for one in sockets:
            _break(one)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="proxy", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            try:
                assert self.target_port is not None
                server = socket.create_connection((LOOPBACK, self.target_port))
            except OSError:
                client.close()
                continue
            for one in (client, server):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._sockets |= {client, server}
            connection = Connection(client, server)
            self._start(self._requests, connection)
            self._start(self._answers, connection)

    def _requests(self, connection: Connection) -> None:
        with suppress(OSError):
            for frame in self._frames(connection.client):
                if self._hold is not None and self._hold(frame):
                    connection.held.add(frame[8:12])
                trap = self._caught(frame)
                if trap is None:
                    connection.server.sendall(frame)
                elif trap.forward:
                    connection.doomed.set()
                    connection.server.sendall(frame)
                else:
                    self.sprung.set()
                    break
        if not connection.doomed.is_set():  # else the answer is still awaited; whoever gets it cuts
            self._cut(connection)

    def _answers(self, connection: Connection) -> None:
        with suppress(OSError):
            for answer in self._received(connection.server):
                if connection.doomed.is_set():
                    # The server has answered, so it has done it; nobody will hear of it.
                    self.sprung.set()
                    break
                if answer[4:8] in connection.held:
                    with self._lock:
                        self._kept.append((connection, answer))
                else:
                    connection.answer(answer)
        self._cut(connection)

    def _received(self, server: socket.socket) -> Iterator[bytes]:
        """Whole answers where their frames are known, else what comes as it comes."""
        if self._framing is kafka_frame:
            yield from self._frames(server)
        else:
            while data := server.recv(CHUNK):
                yield data

    def _frames(self, sender: socket.socket) -> Iterator[bytes]:
        data = b""
        number = 0
        while received := sender.recv(CHUNK):
            data += received
            while (size := self._framing(data, number)) is not None:
                yield data[:size]
                data = data[size:]
                number += 1

    def _caught(self, frame: bytes) -> Trap | None:
        with self._lock:
            trap = self._trap
            if trap is None or not trap.matches(frame):
                return None
            trap.passes_left -= 1
            if trap.passes_left > 0:
                return None
            self._trap = None
            return trap

    def _cut(self, connection: Connection) -> None:
        for one in (connection.client, connection.server):
            _break(one)
        with self._lock:
            self._sockets -= {connection.client, connection.server}


def _break(one: socket.socket) -> None:
    """Wake whoever reads from it, and close it."""
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
