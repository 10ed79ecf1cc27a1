"""A message that takes the process with it, whenever it is tried: put aside, and everything else is done."""

from __future__ import annotations

import json
import signal
from collections import Counter

import pytest

from tests.conftest import Deploy, Start
from tests.support import faulty_table, letters, sending, sql
from tests.support.processes import Process
from tests.support.reading import read_all
from tests.support.sending import Sent
from tests.support.verifier import Verifier
from tests.support.waiting import eventually

RECORDS = 200
DEADLY = "m77"
EXIT_CODES = {"exit": 9, "exit in a task": 1}


@pytest.mark.parametrize(
    ("quarantine_after", "max_messages", "way"),
    [(2, 50, "exit"), (3, 50, "exit"), (3, RECORDS, "exit"), (2, 50, "exit in a task")],
)
def test_record_that_kills_the_process_is_quarantined_and_everything_else_is_done(
    quarantine_after: int, max_messages: int, way: str, deployment: Deploy, start: Start
) -> None:
    """In a batch that has more partitions than the one it is in, and in one that has not.

    `sys.exit(3)` in a task that a handler has started is such a death too, and not an exit with a meaning of ours.
    """
    deployed = deployment(
        partitions=2,
        dead_letters=True,
        settings={
            "handlers": {"T": "tests.support.faulty:apply"},
            "failure": {"quarantine_after": quarantine_after},
            "batch": {"max_messages": max_messages, "linger_ms": 200},
        },
    )
    sql.execute(deployed.database, faulty_table.CREATE)
    records = [
        Sent({"what": f"m{n}", "do": way if f"m{n}" == DEADLY else None}, id=f"m{n}", partition=n % 2)
        for n in range(RECORDS)
    ]
    sending.send(deployed.bootstrap_servers, deployed.input_topic, records)
    verifier = deployed.verifier()
    deaths = 0
    while not survived(start(deployed), verifier, EXIT_CODES[way]):
        deaths += 1
        # The first one or two are not on record, the next one tells where to look, and two are no chance.
        assert deaths <= max(quarantine_after, 4) + 1, "it was to be quarantined by now"
    print(f"{deaths} processes died, quarantine_after = {quarantine_after}")
    assert deaths >= quarantine_after, "it was put aside before it was sure"

    others = [f"m{n}" for n in range(RECORDS) if f"m{n}" != DEADLY]
    assert Counter(row["what"] for row in sql.fetch(deployed.database, "SELECT what FROM effects")) == Counter(others)
    told = [
        json.loads(output.value() or b"")["what"]
        for output in read_all(deployed.bootstrap_servers, deployed.output_topic)
    ]
    assert Counter(told) == Counter(others)
    (row,) = sql.fetch(deployed.database, "SELECT *, status::text AS status FROM inbox WHERE status <> 'completed'")
    assert (row["message_id"], row["status"]) == (DEADLY, "failed")
    assert json.loads(row["error"])["reason"] == "quarantined"
    (letter,) = letters.read(deployed.bootstrap_servers, deployed.dead_letter_topic)
    assert (letter.notes["message-id"], letter.notes["reason"]) == (DEADLY, "quarantined")
    assert letter.value == records[int(DEADLY[1:])].payload()


def test_message_that_was_under_way_at_one_death_is_tried_again_however_often_owners_came_and_went(
    deployment: Deploy, start: Start
) -> None:
    """Orderly restarts and rebalances of an idle partition are nobody's death."""
    deployed = deployment(
        partitions=1,
        settings={"handlers": {"T": "tests.support.faulty:apply"}, "failure": {"quarantine_after": 2}},
    )
    sql.execute(deployed.database, faulty_table.CREATE)
    for _ in range(4):
        idle = start(deployed)
        idle.wait_for_partitions(1)
        idle.terminate()
        assert idle.wait() == 0, idle.tail()
    sending.send(deployed.bootstrap_servers, deployed.input_topic, [Sent({"what": "m0"}, id="m0")])
    doomed = start(deployed, failpoints="after_handlers=kill")
    assert doomed.wait() == -signal.SIGKILL, doomed.tail()
    start(deployed)
    deployed.verifier().wait_until_done()
    rows = sql.fetch(deployed.database, "SELECT status::text, error->>'message' AS error FROM inbox")
    assert [tuple(row) for row in rows] == [("completed", None)]


def survived(process: Process, verifier: Verifier, exit_code: int) -> bool:
    """Whether it gets through all there is to do; False when it has died of it."""
    eventually(lambda: not process.running or verifier.is_done(), 60, process.tail)
    if process.running:
        process.terminate()
        assert process.wait() == 0, process.tail()
        return True
    assert process.wait() == exit_code, process.tail()
    return False
