"""What handlers queue: how it is sent, in which order, and who is blamed if Postgres does not want it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.integration.conftest import MakeBench
from tests.support import handlers
from tests.support.bench import Bench, Sent

FULL_BATCH = {"max_messages": 1000, "linger_ms": 300}


def asking(name: str, *steps: Any, key: bytes | None = b"k", **fields: Any) -> Sent:
    return Sent({"steps": list(steps)}, id=name, key=key, **fields)


async def count_statements(bench: Bench) -> None:
    await bench.execute(
        "CREATE TABLE statements (what text)",
        """CREATE FUNCTION count_statement() RETURNS trigger LANGUAGE plpgsql AS $$
           BEGIN INSERT INTO statements VALUES (split_part(ltrim(current_query()), ' ', 1)); RETURN NULL; END $$""",
        "CREATE TRIGGER counting AFTER INSERT ON effects FOR EACH STATEMENT EXECUTE FUNCTION count_statement()",
    )


async def statements(bench: Bench) -> list[str]:
    return [row["what"] for row in await bench.rows("SELECT what FROM statements")]


async def transactions(bench: Bench) -> int:
    """How many committed batches the inbox has rows of."""
    return int((await bench.rows("SELECT count(DISTINCT xmin::text) FROM inbox"))[0]["count"])


@pytest.mark.parametrize(("step", "tag"), [("collect", "INSERT"), ("insert", "COPY")])
async def test_what_is_collected_or_inserted_goes_in_one_statement_per_batch(
    bench: MakeBench, step: str, tag: str
) -> None:
    b = bench("steps", batch=FULL_BATCH)
    await count_statements(b)
    b.send([asking(f"m{n}", [step, f"w{n}"], key=f"k{n}".encode()) for n in range(400)])
    await b.run_until_done()
    assert await b.effects() == [f"w{n}" for n in range(400)]
    assert await statements(b) == [tag] * await transactions(b)
    assert len(await statements(b)) < 100


async def test_the_count_would_tell_one_statement_per_message(bench: MakeBench) -> None:
    b = bench("steps", batch=FULL_BATCH)
    await count_statements(b)
    b.send([asking(f"m{n}", ["write", f"w{n}"], key=f"k{n}".encode()) for n in range(50)])
    await b.run_until_done()
    assert len(await statements(b)) == 50


async def test_whatever_is_queued_for_one_key_runs_in_its_order(bench: MakeBench) -> None:
    """`append` changes every row there is so far, so what each row ends with tells what came after it."""
    b = bench("steps", batch=FULL_BATCH)
    b.send(
        [
            asking("m0", ["collect", "a"], ["append", "1"], ["insert", "b"], ["append", "2"]),
            asking("m1", ["insert", "c"], ["collect", "d"], ["append", "3"]),
            asking("m2", ["write", "e"], ["append", "4"], ["collect", "f"]),
        ]
    )
    await b.run_until_done()
    assert await b.effects() == ["a1234", "b234", "c34", "d34", "e4", "f"]


async def test_a_read_sees_everything_queued_before_it_and_nothing_queued_after(bench: MakeBench) -> None:
    b = bench("steps", batch=FULL_BATCH)
    b.send(
        [
            asking("m0", ["collect", "a"], ["insert", "b"], ["write", "c"], key=b"one"),
            asking("m1", ["insert", "d"], ["read"], ["collect", "e"], key=b"two"),
            asking("m2", ["read"], ["execute", "f"], ["read"], key=b"three"),
        ]
    )
    await b.run_until_done()
    rows = await b.inbox()
    (seen,) = json.loads(rows["m1"]["result"])
    assert sorted(seen) == ["a", "b", "c", "d"]
    first, second = json.loads(rows["m2"]["result"])
    assert first == [*seen, "e"]
    assert second == [*seen, "e", "f"]


POISON = {"constraint": "w13", "wrong type": 5, "null": None, "NUL": "a\0b"}


@pytest.mark.parametrize("step", ["collect", "insert"])
async def test_queued_row_that_postgres_refuses_fails_its_message_alone(bench: MakeBench, step: str) -> None:
    b = bench("steps", batch=FULL_BATCH)
    await b.execute("ALTER TABLE effects ADD CHECK (what <> 'w13')")
    sent = [asking(f"g{n}", [step, f"g{n}"], key=b"g") for n in range(40)]
    places = {name: 7 * n + 3 for n, name in enumerate(POISON)}
    for name, place in places.items():
        sent.insert(place, asking(name, [step, POISON[name]], key=b"poison"))
    b.send(sent)
    await b.run_until_done()
    assert await b.effects() == [f"g{n}" for n in range(40)]
    rows = await b.inbox()
    assert {name for name, row in rows.items() if row["status"] != "completed"} == set(POISON)
    for name, poison in POISON.items():
        row = rows[name]
        found = (row["status"], row["offset"], row["record_key"], row["type"])
        assert found == ("failed", places[name], b"poison", "T")
        assert json.loads(row["payload"]) == {"steps": [[step, poison]]}
        error = json.loads(row["error"])
        assert error["reason"] == "handler_error"
        assert ("unnest" if step == "collect" else "insert into effects") in error["message"]
    assert "SQLSTATE 23514" in json.loads(rows["constraint"]["error"])["message"]


async def test_poison_beside_other_queued_writes_takes_nothing_of_its_neighbours_with_it(bench: MakeBench) -> None:
    b = bench("steps", batch=FULL_BATCH)
    await b.execute("ALTER TABLE effects ADD CHECK (what <> 'bad')")
    b.send(
        [
            asking(f"m{n}", ["write", f"w{n}"], ["collect", "bad" if n in (3, 11) else f"c{n}"], ["insert", f"i{n}"])
            for n in range(12)
        ]
    )
    await b.run_until_done()
    expected = [what for n in range(12) if n not in (3, 11) for what in (f"w{n}", f"c{n}", f"i{n}")]
    assert sorted(await b.effects()) == sorted(expected)
    assert {name for name, row in (await b.inbox()).items() if row["status"] == "failed"} == {"m3", "m11"}


async def test_rows_go_to_the_schema_that_is_named(bench: MakeBench) -> None:
    b = bench("steps", batch=FULL_BATCH)
    await b.execute(
        "CREATE SCHEMA warehouse",
        'CREATE TABLE warehouse."Odd Name" (id integer PRIMARY KEY, "Any Column" text, at integer DEFAULT 7)',
    )
    b.send(
        [
            asking(f"m{n}", ["insert into", "warehouse.Odd Name", {"id": n, "Any Column": f"w{n}"}], key=None)
            for n in range(5)
        ]
    )
    await b.run_until_done()
    rows = await b.rows('SELECT id, "Any Column" AS what, at FROM warehouse."Odd Name" ORDER BY id')
    assert [(row["id"], row["what"], row["at"]) for row in rows] == [(n, f"w{n}", 7) for n in range(5)]


CANNOT_WORK: list[tuple[Any, str]] = [
    (["insert into", "effects", {"no_such": 1}], "no_such"),
    (["insert into", "no_such_table", {"what": "x"}], "no_such_table"),
    (["insert into", "no_such_schema.effects", {"what": "x"}], "no_such_schema"),
    (["insert into", "effects", {"what; DROP TABLE effects": "x"}], "what; DROP TABLE effects"),
    (["insert into", "effects", {}], "insert('effects') names no columns; write insert('effects', column=value)"),
    (["collect"], "collect() needs at least one argument to gather; without any, use write()"),
    (["collect", "x", "one too many"], "2"),
]


async def test_call_that_cannot_work_says_what_is_wrong_with_it(bench: MakeBench) -> None:
    b = bench("steps", batch=FULL_BATCH)
    sent = [asking(f"good{n}", ["insert", f"g{n}"]) for n in range(10)]
    for n, (step, _) in enumerate(CANNOT_WORK):
        sent.insert(2 * n, asking(f"bad{n}", step))
    b.send(sent)
    await b.run_until_done()
    assert await b.effects() == [f"g{n}" for n in range(10)]
    rows = await b.inbox()
    for n, (step, told) in enumerate(CANNOT_WORK):
        assert rows[f"bad{n}"]["status"] == "failed", step
        assert told in json.loads(rows[f"bad{n}"]["error"])["message"]
    assert {row["status"] for name, row in rows.items() if name.startswith("good")} == {"completed"}


@pytest.mark.parametrize(
    "kinds",
    [
        {"U": "upsert_many", "D": "delete_many"},
        {"U": "upsert_and_delete", "D": "delete_many"},
        {"U": "upsert_many", "D": "upsert_and_delete"},
    ],
    ids=["both in batches", "deletes in batches", "upserts in batches"],
)
async def test_queued_writes_of_one_key_keep_their_order_from_one_handler_to_the_next(
    bench: MakeBench, kinds: dict[str, str]
) -> None:
    b = bench(kinds, batch=FULL_BATCH)
    await b.execute("CREATE TABLE latest (key bytea PRIMARY KEY, what text)")
    feed = [(b"a", "1"), (b"b", "1"), (b"a", "delete"), (b"b", "delete"), (b"a", "2")]
    b.send(
        [Sent({"what": what}, key, "D" if what == "delete" else "U", id=f"m{n}") for n, (key, what) in enumerate(feed)]
    )
    await b.run_until_done()
    rows = await b.rows("SELECT key, what FROM latest ORDER BY key")
    assert [(row["key"], row["what"]) for row in rows] == [(b"a", "2")]


async def test_failed_message_keeps_no_result(bench: MakeBench) -> None:
    b = bench({"T": "answer", "L": "result_with_an_output_too_large"}, batch=FULL_BATCH)
    b.send([Sent({"what": "x"}, id="m"), Sent({}, id="large", type="L"), Sent({"what": "y"}, id="n")])
    await b.run_until_done()
    rows = await b.inbox()
    assert {name: (row["status"], row["result"] is None) for name, row in rows.items()} == {
        "m": ("completed", False),
        "large": ("failed", True),
        "n": ("completed", False),
    }
    assert await b.effects() == ["x", "y"]
    assert handlers.calls["large"] == 1


async def test_result_of_a_type_without_inbox_leaves_the_row_of_another_message_alone(bench: MakeBench) -> None:
    b = bench({"T": "apply", "A": {"call": "answer", "inbox": False}}, batch=FULL_BATCH)
    b.send([Sent({"what": "x"}, id="o1"), Sent({"what": "y"}, id="o1", type="A")])
    await b.run_until_done()
    assert await b.effects() == ["x", "y"]
    assert {name: row["result"] for name, row in (await b.inbox()).items()} == {"o1": None}
