"""`processor verify` after an honest run: kills, duplicates, failures, redrives; and one fault in the middle of it."""

from __future__ import annotations

import json
import signal
from typing import Any

from tests.conftest import AMPLE_STOCK, SKUS, Deploy, Start
from tests.support import sql
from tests.support.command import processor
from tests.support.deployments import PROJECT, Deployment
from tests.support.waiting import eventually

KILLS = (("after_claim", 2), ("after_postgres_commit", 3), ("after_produce", 2), ("before_kafka_commit", 1))
SECONDS = 60.0


def verified(deployed: Deployment, *arguments: str) -> tuple[int, dict[str, Any]]:
    topics = ("--output-topic", deployed.output_topic, "--output-topic", deployed.dead_letter_topic)
    done = processor(PROJECT, "verify", str(deployed.config), "--json", *topics, *arguments)
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def test_verify_says_clean_after_an_honest_run_and_names_the_one_row_that_is_taken_away(
    deployment: Deploy, start: Start
) -> None:
    """Two skus are unknown at first: their orders fail, and those of one are redriven when it is there."""
    settings = {"failure": {"quarantine_after": 100, "budget_percent": 100}}
    deployed = deployment(partitions=2, dead_letters=True, settings=settings)
    feed = deployed.feed(skus=SKUS + 2, duplicates=0.2)
    feed.send(200)
    with feed.flowing(rate=100):
        for point, number in KILLS:
            doomed = start(deployed, failpoints=f"{point}=kill@{number}")
            assert doomed.wait() == -signal.SIGKILL, doomed.tail()
        survivor = start(deployed)
        survivor.wait_for_partitions(deployed.partitions)
        code, said = verified(deployed)  # beside the service
        assert (code, said["found"]) == (0, {})
    verifier = deployed.verifier()
    eventually(verifier.is_done, SECONDS, "all input committed")

    sql.execute(deployed.database, "INSERT INTO stock (sku, on_hand) VALUES ($1, $2)", f"sku-{SKUS}", AMPLE_STOCK)
    redriven = processor(PROJECT, "dlq", "redrive", str(deployed.config), "--all")
    assert "failed again" in redriven.stdout, redriven.stderr
    survivor.terminate()
    assert survivor.wait() == 0

    code, said = verified(deployed, "--sole-writer")
    assert (code, said["found"], said["notes"]) == (0, {}, [])
    counts, outputs = said["input"], said["outputs"]
    assert all(counts[kind] for kind in ("completed", "duplicate", "redriven", "failed")), counts
    assert counts["records"] == sum(counts.values()) - counts["records"] > feed.records
    assert outputs["records"] == outputs["with_origin"] + outputs["dead_letters"]
    assert outputs["with_origin"] == counts["completed"]

    sql.execute(deployed.database, "CREATE TABLE kept AS SELECT * FROM inbox")
    taken = sql.fetch(
        deployed.database,
        """DELETE FROM inbox WHERE key = (SELECT key FROM inbox WHERE status = 'completed' LIMIT 1)
           RETURNING partition_id, "offset" """,
    )
    code, said = verified(deployed)
    assert (code, set(said["found"]), said["found"]["orphan_output"]) == (5, {"lost_row", "orphan_output"}, len(taken))
    lost = [finding for finding in said["findings"] if finding["kind"] == "lost_row"]
    assert len({finding["id"] for finding in lost}) == 1, "itself and its duplicates"
    assert taken[0]["offset"] in [finding["offset"] for finding in lost]
    sql.execute(deployed.database, "INSERT INTO inbox SELECT * FROM kept ON CONFLICT DO NOTHING")

    half = "(SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY received_at) FROM inbox)"
    sql.execute(
        deployed.database, f"UPDATE inbox SET received_at = received_at - interval '30 days' WHERE received_at < {half}"
    )
    pruned = processor(PROJECT, "prune", str(deployed.config), "--json")
    assert json.loads(pruned.stdout)["deleted"] > 0, pruned.stderr
    code, said = verified(deployed, "--sole-writer")
    assert (code, said["found"], said["notes"]) == (0, {}, [])
    assert said["input"]["forgotten"] > 0
    assert said["outputs"]["with_origin"] == counts["completed"]
