"""What the text of a statement says: never less than Postgres would do, and None where it is out of the ordinary."""

from __future__ import annotations

import pytest

from processor.postgres import sqltext


@pytest.mark.parametrize(
    ("sql", "change"),
    [
        ("INSERT INTO t VALUES ($1)", "insert"),
        ("  -- a comment\n/* and another */ update t set a = 1", "update"),
        ("INSERT INTO t VALUES ($1) ON CONFLICT (a) DO UPDATE SET b = 1", "insert"),
        ("WITH x AS (SELECT 1 FROM t FOR NO KEY UPDATE) DELETE FROM t", "delete"),
        ("WITH x AS (DELETE FROM t RETURNING a) INSERT INTO u SELECT a FROM x", None),
        ("WITH x AS (DELETE FROM t RETURNING a) SELECT a FROM x", None),
        ("MERGE INTO t USING u ON true WHEN MATCHED THEN DELETE", None),
        ("SELECT 'INSERT INTO t' FROM t FOR UPDATE", None),
        ("SELECT $$ INSERT INTO t $$, $x$ DELETE $x$", None),
    ],
)
def test_change_is_the_one_command_that_changes_something(sql: str, change: str | None) -> None:
    said = sqltext.read(sql)
    assert said is not None
    assert said.change == change


@pytest.mark.parametrize(
    "sql",
    [
        "TRUNCATE t",
        "CALL p()",
        "",
        "/* SELECT /* */ DELETE FROM t; */ SELECT 1",
        'SELECT U&"\\0061"',
        r"SELECT 'a\'",
    ],
)
def test_what_is_out_of_the_ordinary_is_not_read(sql: str) -> None:
    assert sqltext.read(sql) is None


@pytest.mark.parametrize(
    ("sql", "may_set_id"),
    [
        ("UPDATE t SET a = 1 WHERE id = 2", False),
        ("UPDATE t SET a = 1, id = 2", True),
        ("UPDATE t SET (a, id) = (1, 2) WHERE a = 1", True),
        ("UPDATE t SET a = b IS DISTINCT FROM c, ID = 2", True),
        ('UPDATE t SET "where" = 1, "id" = 2', True),
        ("UPDATE t SET a = (SELECT b FROM u WHERE c = 1), id = 2", True),
        ("UPDATE t SET a = 'x' FROM u WHERE t.id = u.id RETURNING id", False),
        ("INSERT INTO t (id) VALUES ($1) ON CONFLICT (id) DO UPDATE SET a = 1 WHERE t.id > 1", False),
        ("INSERT INTO t (id) VALUES ($1) ON CONFLICT (id) DO UPDATE SET a = 1, id = 2", True),
        ("INSERT INTO t AS set SELECT a FROM s ON CONFLICT (a) DO UPDATE SET id = 3", True),
        ("UPDATE t SET a = excluded.where, id = 2", True),
    ],
)
def test_columns_that_may_be_set_stand_between_set_and_where(sql: str, may_set_id: bool) -> None:
    said = sqltext.read(sql)
    assert said is not None
    assert ("id" in said.assigned) is may_set_id


def test_functions_are_found_by_their_parentheses_and_behind_dots() -> None:
    said = sqltext.read(
        "SELECT f(1), \"G h\" (2), s.k /* here */ (3), t.row_function, 'no(1)', $q$no(1)$q$ FROM t -- no("
    )
    assert said is not None
    assert said.called == {"f", "g h", "k"}
    assert said.dotted == {"k", "row_function"}


@pytest.mark.parametrize(
    ("body", "may"),
    [
        ("BEGIN NEW.updated_at := now(); RETURN NEW; END", False),
        ("BEGIN IF NEW.a > 5 THEN NEW.a := 5; END IF; RETURN NEW; END", False),
        ("BEGIN INSERT INTO log VALUES (NEW.id); RETURN NEW; END", True),
        ("BEGIN NEW.total := sum(amount) FROM entries WHERE account = NEW.id; RETURN NEW; END", True),
        ("BEGIN IF count(*) > 5 FROM entries THEN RAISE 'too many'; END IF; RETURN NEW; END", True),
    ],
)
def test_function_may_do_more_than_calculate_if_it_names_a_table_or_a_command(body: str, may: bool) -> None:
    assert sqltext.may_run_statements(body) is may
