"""`processor dlq list` and `show` on real rows."""

from __future__ import annotations

import base64
import subprocess
import sys
from datetime import timedelta

from tests.support import sql
from tests.support.shop import INSERT, NOW, Shop


def test_filters_work_alone_and_together(shop: Shop) -> None:
    shop.row("a", 1, type_="A", key=b"k1", error={"class": "bug", "reason": "KeyError"})
    shop.row("b", 2, type_="B", key=b"k2", at=NOW - timedelta(hours=3), error={"message": "NUL \0 and \\u0000"})
    shop.row("c", 3, partition=1, key=b"\xff\x00", at=NOW - timedelta(days=2))
    shop.row("d", 4, status="parked", key=b"k1", parked_key=b"k1")
    shop.row("e", 5, status="discarded")
    shop.row("f", 6, status="pending")
    shop.row("g", 7, status="processing")
    shop.row("h", 8, status="completed")
    sql.execute(
        shop.database,
        INSERT,
        "other",
        "x",
        shop.sources[1] + 1,
        9,
        "failed",
        "A",
        b"k1",
        b"",
        "[]",
        None,
        NOW,
        None,
        "[]",
    )

    assert shop.ids() == ["a", "b", "d", "c"]
    assert shop.ids("--id", "c", "--id", "a", "--id", "x", "--id", "h") == ["a", "c"]
    assert shop.ids("--key", "k1") == ["a", "d"]
    assert shop.ids("--key-hex", "ff00") == ["c"]
    assert shop.ids("--type", "A") == ["a"]
    assert shop.ids("--class", "poison") == ["b", "c"]
    assert shop.ids("--reason", "KeyError") == ["a"]
    assert shop.ids("--error-reason", "rejected") == ["b", "c"]
    assert shop.ids("--partition", "1") == ["c"]
    assert shop.ids("--topic", shop.topic) == ["a", "b", "d", "c"]
    assert shop.ids("--topic", "elsewhere") == []
    assert shop.ids("--since", "1h") == ["a", "d"]
    assert shop.ids("--since", "1d", "--until", "1h") == ["b"]
    assert shop.ids("--until", (NOW - timedelta(days=1)).isoformat()) == ["c"]
    assert shop.ids("--key", "k1", "--class", "bug", "--partition", "0") == ["a"]
    assert shop.ids("--status", "discarded", "--status", "pending") == ["e", "f"]
    assert shop.ids("--status", "processing") == ["g"]


def test_list_is_bounded_and_says_how_many_more_there_are(shop: Shop) -> None:
    shop.many(7)
    done = shop.dlq("list", "--limit", "3")
    assert [line.split("\t")[0] for line in done.stdout.splitlines()] == ["id", "m0", "m1", "m2"]
    assert done.stderr.startswith("4 more")
    found = shop.json("list", "--limit", "3")
    assert (len(found["messages"]), found["total"], found["more"]) == (3, 7, 4)
    assert found["messages"][0]["key"] == "k"


def test_show_prints_everything_and_raw_the_bytes(shop: Shop) -> None:
    stored = [["type", "T"], ["bin", {"base64": base64.b64encode(b"\xff\x01").decode()}], ["none", None]]
    error = {"message": "broken\x1b[31m", "traceback": "Traceback\n  line 1\nKeyError: 'x'"}
    shop.row("m 1", 17, payload=b'{"total":12}', headers=stored, error=error)
    done = shop.dlq("show", "m 1")
    assert done.returncode == 0
    for text in ("m 1", "17", '"total": 12', "bin: 0xff01", "none: null", "KeyError: 'x'", "reason=rejected", "poison"):
        assert text in done.stdout, text
    assert "\x1b" not in done.stdout
    shown = shop.json("show", "m 1")
    assert shown["payload"] == {"data": '{"total":12}', "encoding": "text"}
    assert shown["headers"] == [["type", "T", "text"], ["bin", "ff01", "hex"], ["none", None, None]]
    assert (shown["topic"], shown["partition"], shown["offset"], shown["attempts"]) == (shop.topic, 0, 17, 2)
    assert shown["history"][0]["event"] == "failed"

    binary = bytes(range(256))
    shop.row("m2", 18, payload=binary)
    raw = subprocess.run(
        [sys.executable, "-m", "processor", "dlq", "show", "shop.toml", "m2", "--raw"],
        cwd=shop.folder, capture_output=True, timeout=60, check=True,
    )  # fmt: skip
    assert raw.stdout == binary


def test_lines_of_json_hold_what_the_document_holds(shop: Shop) -> None:
    shop.many(3)
    found = shop.json("list", "--limit", "2")
    assert shop.lines("list", "--limit", "2") == found["messages"]
    assert shop.dlq("list", "--limit", "2", "-o", "jsonl").stderr.startswith("1 more")
    assert shop.lines("show", "m0") == [shop.json("show", "m0")]


def test_unknown_id_is_one_line_and_exit_1(shop: Shop) -> None:
    done = shop.dlq("show", "nobody")
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert "no message 'nobody'" in line


def test_a_database_without_tables_is_to_be_migrated(shop: Shop, empty_database: str) -> None:
    done = shop.dlq("list", PROCESSOR_DATABASE__URL=empty_database)
    assert done.returncode == 1
    assert "processor migrate" in done.stderr


def test_id_that_is_scoped_by_type_is_found_without_its_type_if_only_one_message_has_it(shop: Shop) -> None:
    shop.identify(scope_by_type=True)
    shop.row("T:A1", 1)
    shop.row("U:A2", 2, type_="U")
    shop.row("other:A3", 3, type_="other")  # of a type that [handlers] does not name
    shop.completed("U:A4", 4)
    for given, id_ in (("A1", "T:A1"), ("A2", "U:A2"), ("A3", "other:A3"), ("A4", "U:A4")):
        assert shop.json("show", given)["id"] == id_
        assert shop.json("show", id_)["id"] == id_
    assert [shop.ids("--id", given) for given in ("A1", "A2", "other:A3", "A4")] == [
        ["T:A1"],
        ["U:A2"],
        ["other:A3"],
        [],
    ]
    assert shop.ids("--id", "A3", "--id", "A1") == ["T:A1", "other:A3"]


def test_id_that_messages_of_two_types_have_is_told_apart_by_type(shop: Shop) -> None:
    shop.identify(scope_by_type=True)
    shop.row("T:A", 1)
    shop.row("U:A", 2, type_="U")
    shop.completed("T:B", 3)
    shop.completed("U:B", 4)
    for id_ in "AB":
        done = shop.dlq("show", id_)
        assert (done.returncode, done.stdout) == (1, "")
        (line,) = done.stderr.splitlines()
        assert f"2 messages with the id '{id_}': 'T:{id_}', 'U:{id_}'; give one of these, or --type" in line
        assert shop.json("show", id_, "--type", "U")["id"] == f"U:{id_}"
    assert shop.json("show", "U:A", "--type", "U")["id"] == "U:A"
    assert shop.ids("--id", "A") == ["T:A", "U:A"]
    assert shop.ids("--id", "A", "--type", "U") == shop.ids("--id", "U:A", "--type", "U") == ["U:A"]
    done = shop.dlq("show", "A", "--type", "V")
    assert (done.returncode, "no message 'A' of type 'V' in its inbox, also not as 'V:A'" in done.stderr) == (1, True)


def test_id_in_a_window_is_found_without_it_while_its_row_knows_it(shop: Shop) -> None:
    shop.identify(scope_by_type=True, window_seconds=60)
    shop.row("T:A@120", 1)
    shop.row("T:B@120", 2)
    shop.row("T:B@180", 3)
    shop.completed("T:C@120", 4)
    assert shop.json("show", "A")["id"] == "T:A@120"
    assert shop.json("show", "A", "--type", "T")["id"] == "T:A@120"
    assert shop.json("show", "A@120")["id"] == "T:A@120"
    assert shop.ids("--id", "T:A") == shop.ids("--id", "A", "--type", "T") == ["T:A@120"]
    assert shop.ids("--id", "B") == ["T:B@120", "T:B@180"]
    assert "2 messages with the id 'B': 'T:B@120', 'T:B@180'" in shop.dlq("show", "B").stderr
    done = shop.dlq("show", "C", "--type", "T")
    assert done.returncode == 1
    assert "as T:C@N, where N is the time of its record in seconds" in done.stderr
    assert "message.window_seconds = 60" in done.stderr
    assert shop.json("show", "C@120")["id"] == "T:C@120"
