"""Distance to a server on this machine: a proxy, in a process of its own, that holds back every byte for a while.

Each direction holds its bytes for half of the delay, so a round trip takes that much longer. However many bytes come,
all are on their way at the same time: nothing limits the throughput. It prints the port that it listens on.

    python -m benchmarks.proxy HOST PORT MILLISECONDS
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import sys
from collections import deque

LOOPBACK = "127.0.0.1"


class Direction(asyncio.Protocol):
    """Bytes from one side, which the other side gets later."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._held: deque[tuple[float, bytes | None]] = deque()  # with the time when they go on; None is the end
        self.source: asyncio.Transport
        self.other: Direction | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.source = transport

    def data_received(self, data: bytes) -> None:
        self._hold(data)

    def connection_lost(self, _error: Exception | None) -> None:
        self._hold(None)

    def connect(self, other: Direction) -> None:
        self.other = other
        self.pass_on()

    def _hold(self, data: bytes | None) -> None:
        self._held.append((self._loop.time() + self._seconds, data))
        if len(self._held) == 1:
            self._loop.call_at(self._held[0][0], self.pass_on)

    def pass_on(self) -> None:
        if self.other is None:
            return
        now = self._loop.time()
        while self._held and self._held[0][0] <= now:
            _, data = self._held.popleft()
            if data is None:
                self.other.source.close()
            else:
                self.other.source.write(data)
        if self._held:
            self._loop.call_at(self._held[0][0], self.pass_on)


class Client(Direction):
    """A client's side, which is connected to the server first."""

    def __init__(self, host: str, port: int, seconds: float) -> None:
        super().__init__(seconds)
        self._server = (host, port)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        try:
            _, server = await self._loop.create_connection(lambda: Direction(self._seconds), *self._server)
        except OSError:
            self.source.abort()
        else:
            server.connect(self)
            self.connect(server)


async def serve(host: str, port: int, seconds: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: Client(host, port, seconds), LOOPBACK, 0)
    print(server.sockets[0].getsockname()[1], flush=True)  # noqa: T201 - for our parent
    await server.serve_forever()


def exact_loop() -> asyncio.AbstractEventLoop:
    """epoll and uvloop round a time-out to whole milliseconds; select does not."""
    return asyncio.SelectorEventLoop(selectors.SelectSelector())


def main() -> None:
    host, port, milliseconds = sys.argv[1:]
    gc.disable()  # nothing here makes cycles, and a collection would be a delay that nobody asked for
    with asyncio.Runner(loop_factory=exact_loop) as runner:
        runner.run(serve(host, int(port), float(milliseconds) / 2000))


if __name__ == "__main__":
    main()
