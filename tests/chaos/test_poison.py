"""Poison among good messages: found, put aside once each with all its evidence, and paid for by nobody else."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pytest

from tests.conftest import Deploy, Start
from tests.support import faulty_table, letters, sending, sql
from tests.support.deployments import Deployment
from tests.support.letters import Letter
from tests.support.reading import read_all
from tests.support.sending import Place, Sent

PARTITIONS = 4
MESSAGES = 50_000
ONE_IN = 100

# What a bad record is told from another one by: the reason and the SQLSTATE in its notes.
KINDS: dict[str, tuple[str, str | None]] = {
    "undecodable": ("not_json", None),
    "rejected": ("rejected", None),
    "forbidden": ("handler_error", "23514"),
}
ODD_HEADERS: list[tuple[str, bytes | None]] = [
    ("raw", b"\xff\x00\xfe"),
    ("null", None),
    ("twice", b"1"),
    ("twice", b"2"),
]


@dataclass(frozen=True)
class Bad:
    record: Sent
    place: Place
    kind: str


def record(number: int, kind: str | None) -> Sent:
    value: Any = {"what": f"w{number}"}
    match kind:
        case "undecodable":
            value = b'{"what": "w%d"' % number
        case "rejected":
            value["do"] = "reject"
        case "forbidden":
            value["what"] = faulty_table.FORBIDDEN
            value["number"] = number
    headers = ODD_HEADERS if kind else []
    return Sent(value, f"k{number % 97}".encode(), id=f"m{number}", headers=headers, partition=number % PARTITIONS)


def kind_of(number: int) -> str | None:
    """One in a hundred is bad, on all partitions and of all kinds."""
    hundred, place = divmod(number, ONE_IN)
    if place != hundred % ONE_IN:
        return None
    return list(KINDS)[hundred % len(KINDS)]


def test_one_per_cent_poison_is_put_aside_and_the_rest_goes_on(deployment: Deploy, start: Start) -> None:
    """How fast, beside the same without poison, is for `make bench` to say."""
    deployed = deployment(
        partitions=PARTITIONS,
        dead_letters=True,
        settings={"handlers": {"T": "tests.support.faulty:apply"}, "batch": None, "profile": "balanced"},
    )
    sql.execute(deployed.database, faulty_table.CREATE)
    kinds = [kind_of(number) for number in range(MESSAGES)]
    records = [record(number, kind) for number, kind in enumerate(kinds)]
    places = sending.send(deployed.bootstrap_servers, deployed.input_topic, records)
    process = start(deployed)
    deployed.verifier().wait_until_done(120)
    process.terminate()
    assert process.wait() == 0, process.tail()
    bad = {
        f"m{number}": Bad(records[number], places[number], kind)
        for number, kind in enumerate(kinds)
        if kind is not None
    }
    assert len(bad) == MESSAGES // ONE_IN

    good = [f"w{number}" for number, kind in enumerate(kinds) if kind is None]
    rows = sql.fetch(deployed.database, "SELECT what FROM effects")
    _assert_each_once(good, [row["what"] for row in rows], "rows")
    outputs = read_all(deployed.bootstrap_servers, deployed.output_topic)
    _assert_each_once(good, [json.loads(output.value() or b"")["what"] for output in outputs], "outputs")
    _assert_failed(deployed, bad)
    _assert_dead_letters(deployed, bad)


def _assert_each_once(expected: list[str], found: list[str], what: str) -> None:
    wrong = Counter(found) - Counter(expected), Counter(expected) - Counter(found)
    assert not any(wrong), f"{what}: {[dict(some.most_common(5)) for some in wrong]} too many, too few"


def _assert_failed(deployed: Deployment, bad: dict[str, Bad]) -> None:
    rows = sql.fetch(deployed.database, "SELECT * FROM inbox WHERE status <> 'completed'")
    assert Counter(row["message_id"] for row in rows) == Counter(bad.keys())
    for row in rows:
        expected = bad[row["message_id"]]
        error = json.loads(row["error"])
        assert (row["status"], row["attempts"], error["class"]) == ("failed", 1, "poison")
        assert (error["reason"], error["sqlstate"]) == KINDS[expected.kind]
        assert (row["record_key"], row["payload"]) == (expected.record.key, expected.record.payload())
        assert (row["offset"], row["timestamp_ms"]) == (expected.place.offset, expected.place.timestamp_ms)


def _assert_dead_letters(deployed: Deployment, bad: dict[str, Bad]) -> None:
    found = letters.read(deployed.bootstrap_servers, deployed.dead_letter_topic)
    assert Counter(letter.notes["message-id"] for letter in found) == Counter(bad.keys())
    for letter in found:
        _assert_complete(letter, deployed, bad[letter.notes["message-id"]])


def _assert_complete(letter: Letter, deployed: Deployment, bad: Bad) -> None:
    """The record as it came, and everything an operator wants to know about it."""
    assert (letter.key, letter.value) == (bad.record.key, bad.record.payload())
    assert letter.headers == bad.record.all_headers()
    notes = dict(letter.notes)
    reason, sqlstate = KINDS[bad.kind]
    assert {name: notes.pop(name, None) for name in ("class", "reason", "sqlstate", "attempts", "type")} == {
        "class": "poison",
        "reason": reason,
        "sqlstate": sqlstate,
        "attempts": "1",
        "type": "T",
    }
    assert {name: notes.pop(name) for name in ("consumer", "topic", "partition", "offset", "timestamp")} == {
        "consumer": deployed.consumer,
        "topic": deployed.input_topic,
        "partition": str(bad.place.partition),
        "offset": str(bad.place.offset),
        "timestamp": str(bad.place.timestamp_ms),
    }
    assert notes.pop("message-id") == bad.record.id
    assert notes.pop("version")
    assert 0 < len(notes.pop("error")) <= 1000
    first, last = (datetime.fromisoformat(notes.pop(name)) for name in ("first-failure", "last-failure"))
    assert first <= last
    assert first.utcoffset() == last.utcoffset() == timedelta(0)
    if bad.kind != "undecodable":
        assert notes.pop("exception")
    notes.pop("exception", None)
    assert notes == {}


RECORDS = 1000


@pytest.mark.parametrize("handler", ["apply_many", "apply"], ids=["a batch handler", "queued writes"])
def test_one_bad_record_in_a_thousand_costs_fewer_than_twenty_transactions(
    handler: str, deployment: Deploy, start: Start
) -> None:
    """Where nobody can tell whose fault it was and the batch has to be taken apart; wherever in it the record is."""
    deployed = deployment(
        partitions=1,
        settings={
            "handlers": {"T": f"tests.support.faulty:{handler}"},
            "batch": {"max_messages": RECORDS, "linger_ms": 5_000},  # so that the thousand are one batch
        },
    )
    sql.execute(deployed.database, faulty_table.CREATE)
    sql.execute(deployed.database, COUNT_TRANSACTIONS)
    counted = []
    for round_, position in enumerate([None, None, 0, 437, 999]):
        before = _transactions(deployed)
        values = [{"what": faulty_table.FORBIDDEN if number == position else f"w{number}"} for number in range(RECORDS)]
        records = [Sent(value, id=f"m{round_}-{number}") for number, value in enumerate(values)]
        sending.send(deployed.bootstrap_servers, deployed.input_topic, records)
        process = start(deployed)
        deployed.verifier().wait_until_done()
        process.terminate()
        assert process.wait() == 0, process.tail()
        counted.append(_transactions(deployed) - before)
    failed = sql.fetch(deployed.database, "SELECT message_id FROM inbox WHERE status = 'failed'")
    assert sorted(row["message_id"] for row in failed) == ["m2-0", "m3-437", "m4-999"]
    assert sql.value(deployed.database, "SELECT count(*) FROM effects") == 5 * RECORDS - 3
    without, with_one = min(counted[:2]), counted[2:]  # the very first start has more to do
    print(f"transactions without a bad record: {without}; with one: {with_one}")
    assert max(with_one) < without + 20


# Every transaction that touches the inbox, the ledger or the handlers' table, whether it is committed or not: a
# sequence is not rolled back. (What Postgres counts itself has autovacuum's in it.)
COUNT_TRANSACTIONS = """
    CREATE SEQUENCE transactions;
    CREATE FUNCTION count_transaction() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        IF current_setting('tests.counted', true) IS DISTINCT FROM pg_current_xact_id()::text THEN
            PERFORM nextval('transactions'), set_config('tests.counted', pg_current_xact_id()::text, true);
        END IF;
        RETURN NULL;
    END $$;
    CREATE TRIGGER count BEFORE INSERT OR UPDATE OR DELETE ON inbox EXECUTE FUNCTION count_transaction();
    CREATE TRIGGER count BEFORE INSERT OR UPDATE OR DELETE ON ledger EXECUTE FUNCTION count_transaction();
    CREATE TRIGGER count BEFORE INSERT OR UPDATE OR DELETE ON effects EXECUTE FUNCTION count_transaction();
"""


def _transactions(deployed: Deployment) -> int:
    found: int = sql.value(deployed.database, "SELECT CASE WHEN is_called THEN last_value ELSE 0 END FROM transactions")
    return found
