"""Asks one broker, in Kafka's own protocol, which brokers serve clients.

A listening port is not enough: a broker accepts connections long before it answers, and another
process may have the port. A client library would do, but it retries and logs at its own pace.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

from processor.stack.ports import LOOPBACK

METADATA_KEY = 3
METADATA_VERSION = 2
TIMEOUT_SECONDS = 2.0


@dataclass(frozen=True)
class Cluster:
    cluster_id: str | None
    node_ids: frozenset[int]


def ask(port: int) -> Cluster | None:
    """What the broker on this port says about its cluster; None while it does not answer."""
    client_id = b"stack"
    # Header: key, version, correlation id, client id. Body: an empty list of topics.
    request = struct.pack(f">hhih{len(client_id)}si", METADATA_KEY, METADATA_VERSION, 1, len(client_id), client_id, 0)
    try:
        with socket.create_connection((LOOPBACK, port), TIMEOUT_SECONDS) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as stream:
                size = struct.unpack(">i", _read(stream.read(4), 4))[0]
                return _parse(_read(stream.read(size), size))
    except (OSError, EOFError, struct.error):
        return None


def _read(data: bytes, size: int) -> bytes:
    if len(data) < size:
        raise EOFError
    return data


def _parse(body: bytes) -> Cluster:
    reader = _Reader(body)
    reader.integer()  # correlation id
    node_ids = set()
    for _ in range(reader.integer()):
        node_ids.add(reader.integer())
        reader.string()  # host
        reader.integer()  # port
        reader.string()  # rack
    return Cluster(cluster_id=reader.string(), node_ids=frozenset(node_ids))


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def integer(self) -> int:
        (value,) = struct.unpack_from(">i", self._data, self._at)
        self._at += 4
        return int(value)

    def string(self) -> str | None:
        (length,) = struct.unpack_from(">h", self._data, self._at)
        self._at += 2
        if length < 0:
            return None
        self._at += length
        return self._data[self._at - length : self._at].decode()
