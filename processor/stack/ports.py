"""Loopback ports that stay ours while a server is down."""

from __future__ import annotations

import random
import socket
from collections.abc import Collection, Iterable, Mapping

from processor.errors import SetupError

LOOPBACK = "127.0.0.1"

# Below the ports systems hand out for outgoing connections (Linux: from 32768, macOS: from 49152).
# Inside that range a client that keeps calling a killed broker could be given the broker's own port
# as its source, connect to itself, and keep the broker from coming back.
CANDIDATES = range(15000, 30000)


def is_free(port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As the servers do: connections that linger after a restart do not count as taken.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
            probe.listen(1)
        except OSError:
            return False
    return True


def choose(wanted: Iterable[str], kept: Mapping[str, int], reserved: Collection[int]) -> dict[str, int]:
    """A port for each name: the kept one while it is free, otherwise another that is free."""
    chosen: dict[str, int] = {}
    for name in wanted:
        port = kept.get(name)
        if port is None or not is_free(port):
            port = _another({*reserved, *kept.values(), *chosen.values()})
        chosen[name] = port
    return chosen


def _another(excluded: Collection[int]) -> int:
    for port in random.sample(CANDIDATES, len(CANDIDATES)):
        if port not in excluded and is_free(port):
            return port
    raise SetupError(f"no free port on {LOOPBACK} between {CANDIDATES.start} and {CANDIDATES.stop - 1}")
