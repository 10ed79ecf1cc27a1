"""Replays beside everything that may go wrong: a database that was restored, SIGKILL at every step."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.conftest import Databases, Deploy, Start, unique
from tests.support import sql
from tests.support.deployments import Deployment
from tests.support.replaying import copy_of, domain, replay

RECORDS = 400


@pytest.fixture
def restored(databases: Databases, database: str) -> Iterator[str]:
    """The name of a database that the test makes."""
    name = unique("restored").replace("-", "_")
    yield name
    sql.execute(sql.with_database(database, "postgres"), f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def run_to_the_end(deployed: Deployment, start: Start, **environ: str) -> None:
    service = start(deployed, **environ)
    deployed.verifier().wait_until_done()
    service.terminate()
    assert service.wait() == 0, service.tail()


def test_what_a_restored_database_lacks_is_done_again_and_no_output_is_sent_twice(
    deployment: Deploy, start: Start, restored: str
) -> None:
    """The dump is of a moment between the two commits: it has outputs that were sent right after it."""
    deployed = deployment()
    feed = deployed.feed()
    feed.send(RECORDS)
    doomed = start(deployed, failpoints="after_postgres_commit=kill@3")
    assert doomed.wait() == -signal.SIGKILL, doomed.tail()
    dump = copy_of(deployed.database, restored)
    run_to_the_end(deployed, start)
    undisturbed = domain(deployed.database)
    assert domain(dump) != undisturbed

    found = replay(deployed, "start", "--all", "--execute", PROCESSOR_DATABASE__URL=dump)

    assert found["state"] == "finished"
    assert (found["processed"], found["failed"], found["outputs"]) != (0, 0, 0)
    assert domain(dump) == undisturbed
    deployed.verifier().assert_exactly_once()

    # The service on this database skips what the replay has done, and goes on.
    feed.send(100)
    moved = replace(deployed, database=dump)
    service = start(moved, PROCESSOR_DATABASE__URL=dump, PROCESSOR_KAFKA__ON_DATABASE_BEHIND="reapply")
    moved.verifier().assert_exactly_once()
    service.terminate()
    assert service.wait() == 0, service.tail()
