"""`processor replay` as an operator uses it: planned, refused, filtered, paused, and rehearsed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from tests.conftest import Deploy, Start, Topics
from tests.support import faulty_table, sending, sql
from tests.support.deployments import Deployment
from tests.support.reading import header, read_all
from tests.support.replaying import processor, replay, serve, started
from tests.support.sending import Sent
from tests.support.waiting import eventually

HANDLERS = {"handlers": {"T": "tests.support.faulty:apply", "U": "tests.support.faulty:apply"}}


def messages(*names: str, type_: str = "T", partition: int = 0) -> list[Sent]:
    return [Sent({"what": name}, name.encode(), type_, name, partition=partition) for name in names]


@pytest.fixture
def deployed(deployment: Deploy) -> Deployment:
    made = deployment(partitions=2, settings=HANDLERS)
    sql.execute(made.database, faulty_table.CREATE)
    return made


def written(deployed: Deployment) -> list[str]:
    return [row["what"] for row in sql.fetch(deployed.database, "SELECT what FROM effects ORDER BY id")]


def sent(deployed: Deployment, topic: str | None = None) -> list[tuple[str, str | None]]:
    """What is in a topic, and by which replay it was sent."""
    records = read_all(deployed.bootstrap_servers, topic or deployed.output_topic)
    found = [(json.loads(one.value() or b"")["what"], header(one, "replay")) for one in records]
    return sorted(found, key=str)


def refusal(deployed: Deployment, *arguments: str, code: int) -> str:
    done = processor(deployed, "replay", "start", str(deployed.config), *arguments)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stderr


def call_with(deployed: Deployment, handler: str, failure: str = "") -> None:
    """Have another handler for T, and other settings."""
    text = deployed.config.read_text()
    before = 'T = "tests.support.faulty:apply"'
    assert before in text
    deployed.config.write_text(text.replace(before, f"T = {handler}").replace("[failure]", f"[failure]\n{failure}"))


def rejected(name: str) -> Sent:
    return Sent({"what": name, "do": "reject"}, name.encode(), "T", name)


def inbox(deployed: Deployment) -> list[Any]:
    """What is on record of the messages, and whether they wait."""
    rows = sql.fetch(
        deployed.database, 'SELECT key, status::text, parked_key IS NOT NULL FROM inbox ORDER BY partition_id, "offset"'
    )
    return [tuple(row) for row in rows]


def everything(deployed: Deployment) -> dict[str, Any]:
    """All that a dry run could have changed: every table, and where every log ends."""
    tables = sql.fetch(deployed.database, "SELECT tablename FROM pg_tables WHERE schemaname = 'public' ORDER BY 1")
    admin = AdminClient({"bootstrap.servers": deployed.bootstrap_servers, "log_level": 0})
    groups = admin.list_consumer_groups().result().valid
    return {
        "tables": {name: sql.fetch(deployed.database, f"SELECT * FROM {name} ORDER BY 1, 2") for (name,) in tables},
        "outputs": len(read_all(deployed.bootstrap_servers, deployed.output_topic)),
        "groups": [one.group_id for one in groups if deployed.consumer in one.group_id],
    }


def test_a_dry_run_after_a_change_names_the_messages_whose_outputs_differ_and_writes_nothing(
    deployed: Deployment, start: Start, tmp_path: Path
) -> None:
    names = ("same", "changed", "two now", "same too", "none now", "fails now")
    serve(deployed, start, *messages(*names), *messages("same", partition=1))
    changed = tmp_path / "changed.toml"
    changed.write_text(deployed.config.read_text().replace("faulty:apply", "faulty:apply_anew"))
    before = everything(deployed)

    found = processor(
        deployed, "replay", "start", str(changed), "--all", "--mode", "dry-run", "--execute", "-o", "json"
    )

    assert found.returncode == 1, found.stderr
    report = json.loads(found.stdout)
    assert (report["processed"], report["skipped"], report["failed"]) == (5, 1, 1)
    assert [(one["message_id"], one["reason"]) for one in report["errors"]] == [("fails now", "rejected")]
    assert report["comparison"]["messages"] == ["changed", "two now", "none now", "fails now"]
    assert report["comparison"]["different"] == {"changed": 1, "new": 1, "gone": 2}
    assert report["comparison"]["same"] == 3
    sample = next(one for one in report["comparison"]["samples"] if one["difference"] == "changed")
    assert (sample["sent"]["value"], sample["made"]["value"]) == ('{"what":"changed"}', '{"what":"changed indeed"}')
    assert everything(deployed) == before

    unchanged = replay(deployed, "start", "--all", "--mode", "dry-run", "--execute")
    assert (unchanged["comparison"]["messages"], unchanged["comparison"]["same"]) == ([], 6)
    assert everything(deployed) == before


def test_a_plan_shows_the_ranges_changes_nothing_and_can_be_run_later(
    deployed: Deployment, start: Start, tmp_path: Path
) -> None:
    serve(deployed, start, *messages("a", "b", "c"), *messages("d", partition=1), PROCESSOR_KAFKA__START="latest")
    assert written(deployed) == []
    plan, before = tmp_path / "plan.json", everything(deployed)

    shown = replay(deployed, "start", "--partition", "0:1-3", "--plan", str(plan), "--name", "later")

    assert [(one["partition"], one["first"], one["end"]) for one in shown["ranges"]] == [(0, 1, 3)]
    assert everything(deployed) == before
    sending.send(deployed.bootstrap_servers, deployed.input_topic, messages("not in the plan"))
    found = replay(deployed, "start", "--plan", str(plan), "--execute", "--reason", "ticket 7")
    assert (found["state"], found["processed"], found["outputs"]) == ("finished", 2, 2)
    assert written(deployed) == ["b", "c"]
    assert sent(deployed) == [("b", "later"), ("c", "later")]
    assert [(one["event"], one.get("reason")) for one in found["history"]] == [
        ("created", "ticket 7"),
        ("started", None),
        ("finished", None),
    ]
    assert "exists already" in refusal(deployed, "--all", "--name", "later", "--execute", code=2)
    again = replay(deployed, "start", "--all", "--execute", "--name", "again")
    assert (again["processed"], again["skipped"]) == (2, 2), "all that the service has passed, but for what is done"


@pytest.mark.parametrize(
    ("filters", "done"),
    [(("--type", "U"), ["u"]), (("--key", "b"), ["b"]), (("--id", "a", "--id", "u"), ["a", "u"])],
)
def test_filters_choose_records_and_the_others_stay_missing(
    filters: tuple[str, ...], done: list[str], deployed: Deployment, start: Start
) -> None:
    serve(deployed, start, *messages("a", "b"), *messages("u", type_="U"), PROCESSOR_KAFKA__START="latest")
    found = replay(deployed, "start", "--since", "1h", *filters, "--execute")
    assert (found["processed"], found["skipped"]) == (len(done), 3 - len(done))
    assert written(deployed) == done


def test_ranges_that_do_not_exist_or_were_forgotten_are_refused_with_those_that_are_there(
    deployed: Deployment, start: Start
) -> None:
    serve(deployed, start, *messages("a", "b", "c"))
    beyond = refusal(deployed, "--partition", "0:1-90", code=2)
    assert "Kafka has the offsets 0-3, not all of 1-90" in beyond
    clipped = replay(deployed, "start", "--partition", "0:1-90", "--clip")
    assert [(one["first"], one["end"]) for one in clipped["ranges"]] == [(1, 3)]
    assert "does not exist" in refusal(deployed, "--partition", "7", "--all", code=2)

    sql.execute(
        deployed.database,
        "INSERT INTO forgotten (partition_id, below) SELECT partition_id, 2 FROM ledger WHERE partition = 0",
    )
    sql.execute(deployed.database, 'DELETE FROM inbox WHERE "offset" < 2')
    assert "Safe: 2-3" in refusal(deployed, "--all", code=3)
    assert replay(deployed, "start", "--from", "2", "--partition", "0", "--execute")["skipped"] == 1
    twice = replay(deployed, "start", "--all", "--despite-forgotten", "--execute")
    assert (twice["processed"], written(deployed)) == (2, ["a", "b", "c", "a", "b"])


def test_a_paused_replay_stops_keeps_its_place_and_goes_on(deployed: Deployment, start: Start) -> None:
    names = [f"n{number}" for number in range(400)]
    serve(deployed, start, *messages(*names), PROCESSOR_KAFKA__START="latest")
    with started(deployed, "start", "--all", "--name", "slow", "--rate", "20", "--execute") as running:
        eventually(lambda: len(written(deployed)) > 1, 30, "some are done")
        second = processor(deployed, "replay", "resume", str(deployed.config), "slow")
        assert (second.returncode, "is being run by another process" in second.stderr) == (1, True), second.stderr
        assert replay(deployed, "pause", "slow", "--reason", "peak")["state"] == "paused"
        stdout, _ = running.communicate(timeout=30)
    assert "slow: paused" in stdout
    part = len(written(deployed))
    assert part < 400
    (listed,) = replay(deployed, "list")["replays"]
    assert (listed["state"], listed["processed"], listed["offsets_done"]) == ("paused", part, part)

    assert replay(deployed, "resume", "slow", "--rate", "100000")["processed"] == 400
    assert written(deployed) == names
    events = [one["event"] for one in replay(deployed, "show", "slow")["history"]]
    assert events == ["created", "started", "paused", "started", "finished"]
    refused = processor(deployed, "replay", "cancel", str(deployed.config), "slow")
    assert (refused.returncode, "is finished" in refused.stderr) == (2, True)


def test_a_scope_of_its_own_applies_each_message_once_more_and_sends_nothing_or_elsewhere(
    deployed: Deployment, start: Start, topics: Topics
) -> None:
    serve(deployed, start, *messages("a", "b"))
    quiet = ("--all", "--mode", "re-apply", "--scope", "model", "--no-outputs", "--execute")
    assert replay(deployed, "start", *quiet)["processed"] == 2
    assert replay(deployed, "start", *quiet, "--name", "once-more")["skipped"] == 2
    assert written(deployed) == ["a", "b", "a", "b"]
    shadow = topics("shadow")
    replay(
        deployed, "start", "--all", "--mode", "re-apply", "--scope", "shadow", "--output-topic", shadow, "--name", "s",
        "--execute",
    )  # fmt: skip
    assert sent(deployed) == [("a", None), ("b", None)]
    assert sent(deployed, shadow) == [("a", "s"), ("b", "s")]


def test_messages_without_inbox_count_as_done_where_the_service_has_been_but_for_those_that_failed(
    deployed: Deployment, start: Start
) -> None:
    call_with(deployed, '{ call = "tests.support.faulty:apply", inbox = false }')
    serve(deployed, start, *messages("a"), rejected("fails"), *messages("b"))
    sending.send(deployed.bootstrap_servers, deployed.input_topic, messages("not processed yet"))

    found = replay(deployed, "start", "--all", "--execute")
    assert (found["processed"], found["failed"], found["skipped"], written(deployed)) == (0, 0, 3, ["a", "b"])
    found = replay(deployed, "start", "--all", "--mode", "re-emit", "--name", "again", "--execute")
    assert (found["processed"], found["failed"], found["skipped"]) == (2, 0, 2)
    assert sent(deployed) == [("a", "again"), ("a", None), ("b", "again"), ("b", None)]


@pytest.mark.parametrize("effect", ["false", "true"])
def test_messages_of_a_parked_key_are_left_to_redrive(effect: str, deployed: Deployment, start: Start) -> None:
    call_with(deployed, f'{{ call = "tests.support.faulty:apply", effect = {effect} }}', 'policy = "park-key"')
    of_one_key = [*messages("first"), rejected("fails"), *messages("waits")]
    serve(deployed, start, *(replace(one, key=b"A") for one in of_one_key), *messages("other"))
    rows = inbox(deployed)

    found = replay(deployed, "start", "--all", "--execute")

    assert (found["processed"], found["failed"], found["skipped"]) == (0, 0, 4)
    assert written(deployed) == ["first", "other"]
    assert inbox(deployed) == rows
    assert [status for _, status, waits in rows if waits] == ["failed", "parked"]
    if effect == "false":
        again = replay(deployed, "start", "--all", "--mode", "re-emit", "--name", "again", "--execute")
        assert again["processed"] == 2
        assert [what for what, by in sent(deployed) if by] == ["first", "other"]


def test_outputs_of_forgotten_messages_are_sent_again_but_not_of_failed_ones_and_no_row_is_left(
    deployed: Deployment, start: Start
) -> None:
    serve(deployed, start, *messages("a", "breaks now"), rejected("fails"))
    sql.execute(
        deployed.database,
        "INSERT INTO forgotten (partition_id, below) SELECT partition_id, 3 FROM ledger WHERE partition = 0",
    )
    sql.execute(deployed.database, "DELETE FROM inbox WHERE status = 'completed'")
    rows = inbox(deployed)
    call_with(deployed, '"tests.support.faulty:apply_anew"')

    command = ("start", str(deployed.config), "--all", "--mode", "re-emit", "--despite-forgotten", "--execute")
    done = processor(deployed, "replay", *command, "-o", "json", PROCESSOR_RETRY__ATTEMPTS="2")

    assert done.returncode == 1, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["processed"], found["failed"], found["skipped"]) == (1, 1, 1)
    assert [status for _, status, _ in rows] == ["failed"]
    assert inbox(deployed) == rows
