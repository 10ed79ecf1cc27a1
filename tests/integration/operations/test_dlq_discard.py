"""`processor dlq discard` on real rows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import orjson

from tests.support.shop import NOW, Shop, on_terminal, park


def test_discard_keeps_who_when_and_why(shop: Shop) -> None:
    shop.row("a", 1, payload=b"evidence")
    shop.row("b", 2)
    done = shop.dlq("discard", "--id", "a", "--reason", "customer “gone”", "--by", "ada", "--yes")
    assert (done.returncode, done.stdout) == (0, "discarded 1\n"), done.stderr
    row = shop.stored("a")
    assert (row["status"], row["parked_key"], row["payload"]) == ("discarded", None, b"evidence")
    failed, discarded = orjson.loads(row["history"])
    assert failed["event"] == "failed"
    at = datetime.fromisoformat(discarded.pop("at"))
    assert NOW - timedelta(minutes=1) < at < datetime.now(UTC) + timedelta(minutes=1)
    assert discarded == {"event": "discarded", "by": "ada", "reason": "customer “gone”"}
    assert shop.stored("b")["status"] == "failed"
    assert shop.json("discard", "--id", "a", "--reason", "again", "--yes")["discarded"] == 0
    assert "ada" in shop.dlq("show", "a").stdout


def test_discarding_the_head_says_that_others_still_wait(shop: Shop) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4, 5)
    assert "1 of their keys still have parked" in shop.dlq("discard", "--id", "m3", "--reason", "x", "--yes").stdout
    assert shop.stored("m3")["parked_key"] is None
    (whole,) = shop.lines("discard", "--key", "k", "--reason", "x", "--yes")
    assert whole == {"discarded": 2, "keys_still_parked": 0}


def test_id_that_may_stand_for_two_messages_gives_up_neither_until_the_type_is_named(shop: Shop) -> None:
    shop.identify(scope_by_type=True)
    shop.row("T:A", 1)
    shop.row("U:A", 2, type_="U")
    done = shop.dlq("discard", "--id", "A", "--reason", "x", "--yes")
    assert (done.returncode, done.stdout) == (1, "")
    assert "2 messages with the id 'A': 'T:A', 'U:A'" in done.stderr
    done = shop.dlq("discard", "--id", "A", "--type", "U", "--reason", "x", "--yes")
    assert (done.returncode, done.stdout) == (0, "discarded 1\n"), done.stderr
    assert [shop.stored(id_)["status"] for id_ in ("T:A", "U:A")] == ["failed", "discarded"]
    assert shop.json("discard", "--id", "A", "--reason", "x", "--yes")["discarded"] == 1, "there is only one left"


def test_on_a_terminal_discard_asks_first(shop: Shop) -> None:
    shop.row("a", 1)
    code, shown = on_terminal(shop, "n\n", "discard", "--id", "a", "--reason", "x")
    assert "give up 1 message for good?" in shown
    assert (code, shop.stored("a")["status"]) == (1, "failed")
    code, _ = on_terminal(shop, "y\n", "discard", "--id", "a", "--reason", "x")
    assert (code, shop.stored("a")["status"]) == (0, "discarded")
