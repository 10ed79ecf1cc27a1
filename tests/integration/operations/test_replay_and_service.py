"""`processor replay` and the service whose records it goes over: neither spoils what the other has."""

from __future__ import annotations

import pytest

from tests.conftest import Deploy, Start
from tests.support import faulty_table, sending, sql
from tests.support.deployments import Deployment
from tests.support.replaying import replay
from tests.support.sending import Sent

HANDLERS = {"handlers": {"T": "tests.support.faulty:apply"}}


def messages(*names: str, do: str | None = None) -> list[Sent]:
    return [Sent({"what": name, "do": do}, name.encode(), "T", name) for name in names]


@pytest.fixture
def deployed(deployment: Deploy) -> Deployment:
    made = deployment(partitions=1, settings=HANDLERS)
    sql.execute(made.database, faulty_table.CREATE)
    return made


def serve(deployed: Deployment, start: Start, *records: Sent, **environ: str) -> None:
    """Let the service process these."""
    sending.send(deployed.bootstrap_servers, deployed.input_topic, records)
    service = start(deployed, **environ)
    service.wait_for_partitions(deployed.partitions)
    deployed.verifier().wait_until_done()
    service.terminate()
    assert service.wait() == 0, service.tail()


def test_what_the_service_has_written_about_its_troubles_stays(deployed: Deployment, start: Start) -> None:
    serve(deployed, start, *messages("a"))
    sql.execute(
        deployed.database,
        "INSERT INTO partition_trouble SELECT consumer, topic, partition, 'halted', 'as the test says', now(), epoch, 0"
        " FROM ledger",
    )
    before = sql.fetch(deployed.database, "SELECT * FROM partition_trouble")
    replay(deployed, "start", "--all", "--execute")
    assert sql.fetch(deployed.database, "SELECT * FROM partition_trouble") == before != []
