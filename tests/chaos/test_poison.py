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
# Good and poisoned stretches take turns, so that whatever else the machine does meanwhile is shared by both.
STRETCH = 10_000
STRETCHES = 5
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
    """Every other stretch is good; in the others one in a hundred is bad, on all partitions and of all kinds."""
    stretch, within = divmod(number, STRETCH)
    hundred, place = divmod(within, ONE_IN)
    if stretch % 2 == 0 or place != hundred % ONE_IN:
        return None
    return list(KINDS)[hundred % len(KINDS)]


def test_one_per_cent_poison_is_put_aside_and_the_rest_goes_on_at_half_the_speed_at_least(
    deployment: Deploy, start: Start
) -> None:
    deployed = deployment(
        partitions=PARTITIONS,
        dead_letters=True,
        settings={"handlers": {"T": "tests.support.faulty:apply"}, "batch": None, "profile": "balanced"},
    )
    sql.execute(deployed.database, faulty_table.CREATE)
    kinds = [kind_of(number) for number in range(2 * STRETCHES * STRETCH)]
    records = [record(number, kind) for number, kind in enumerate(kinds)]
    places: list[Place] = []
    verifier = deployed.verifier()
    process = start(deployed)
    for first in range(0, len(records), STRETCH):
        stretch = records[first : first + STRETCH]
        places += sending.send(deployed.bootstrap_servers, deployed.input_topic, stretch)
        verifier.wait_until_done(120)
    process.terminate()
    assert process.wait() == 0, process.tail()
    bad = {
        f"m{number}": Bad(records[number], places[number], kind)
        for number, kind in enumerate(kinds)
        if kind is not None
    }
    assert len(bad) == STRETCHES * STRETCH // ONE_IN

    good = [f"w{number}" for number, kind in enumerate(kinds) if kind is None]
    rows = sql.fetch(deployed.database, "SELECT what FROM effects")
    _assert_each_once(good, [row["what"] for row in rows], "rows")
    outputs = read_all(deployed.bootstrap_servers, deployed.output_topic)
    told = [(json.loads(output.value() or b"")["what"], output.timestamp()[1]) for output in outputs]
    _assert_each_once(good, [what for what, _ in told], "outputs")
    _assert_failed(deployed, bad)
    _assert_dead_letters(deployed, bad)

    clean, poisoned = _seconds_by_kind(told)
    print(f"{clean:.1f} s without poison, {poisoned:.1f} s with 1 %: {clean / poisoned:.0%} of the speed")
    assert poisoned <= 2 * clean, f"{clean:.1f} s without poison, {poisoned:.1f} s with it"


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


def _seconds_by_kind(told: list[tuple[str, int]]) -> tuple[float, float]:
    """How long the good and the poisoned stretches took: from the broker's first output of each to its last."""
    times: dict[int, list[int]] = {}
    for what, at in told:
        times.setdefault(int(what[1:]) // STRETCH, []).append(at)
    taken = {stretch: (max(found) - min(found)) / 1000 for stretch, found in times.items()}
    return sum(taken[n] for n in taken if n % 2 == 0), sum(taken[n] for n in taken if n % 2 == 1)


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


def _transactions(deployed: Deployment) -> int:
    """Of everybody in this database, committed or not; asked from another one, and when nobody is connected to it."""
    name = deployed.database.rpartition("/")[2]
    elsewhere = sql.with_database(deployed.database, "postgres")
    found: int = sql.value(
        elsewhere, "SELECT xact_commit + xact_rollback FROM pg_stat_database WHERE datname = $1", name
    )
    return found
