"""Servers of these tests' own, which they may kill."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from processor.stack import Stack
from tests.conftest import Databases
from tests.support import servers
from tests.support.proxy import Proxy, kafka_frame
from tests.support.servers import Addresses


@dataclass(frozen=True)
class Fragile:
    """A broker whom clients can reach only through a proxy, and a Postgres."""

    stack: Stack
    broker: Proxy
    databases: Databases

    @property
    def addresses(self) -> Addresses:
        return Addresses(f"127.0.0.1:{self.broker.port}", self.stack.postgres_url)


@pytest.fixture(scope="module")
def fragile(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fragile]:
    with Proxy(kafka_frame) as proxy:
        # The broker tells its clients to come to the proxy.
        advertised = {"advertised.listeners": f"INTERNAL://127.0.0.1:{proxy.port}"}
        with servers.embedded(tmp_path_factory.mktemp("fragile") / "stack", advertised) as stack:
            proxy.target_port = stack.brokers[0].ports["INTERNAL"]
            yield Fragile(stack, proxy, Databases(stack.postgres_url))
