from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import Topics, unique
from tests.support import sql
from tests.support.deployments import write
from tests.support.servers import Servers
from tests.support.shop import Shop


@pytest.fixture
def shop(tmp_path: Path, stack: Servers, database: str, topics: Topics) -> Iterator[Shop]:
    consumer, topic = unique("shop"), topics("orders", partitions=2)
    tables = {
        "handlers": {"T": "shop:handle", "U": "shop:handle"},
        "kafka": {"bootstrap_servers": stack.bootstrap_servers},
        "database": {"url": database},
    }
    write(tmp_path / "shop.toml", {"consumer": consumer, "topic": topic}, tables)
    ledger = """
        INSERT INTO ledger (consumer, topic, partition, epoch, topic_id, partitions,
                             first_offset, next_offset, owner, slot)
        VALUES ($1, $2, $3, 1, 'id', 1, 0, 0, 'me', 0) RETURNING partition_id
    """
    sources = [sql.value(database, ledger, consumer, topic, partition) for partition in (0, 1)]
    sql.value(database, ledger, "other", topic, 0)
    made = Shop(tmp_path, consumer, topic, database, stack.bootstrap_servers, sources)
    yield made
    for process in made.running:
        if process.poll() is None:
            process.kill()
        process.communicate()
