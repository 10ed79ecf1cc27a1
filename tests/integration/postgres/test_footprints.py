"""Which statements touch nothing in common, as Postgres itself sees them: whatever cannot be judged is tied to all."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, TypeAlias

import asyncpg
import pytest

from processor.postgres.footprints import look_up

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]

TABLES = """
    CREATE TABLE accounts (id bigint PRIMARY KEY, code text UNIQUE, balance bigint NOT NULL DEFAULT 0, "From" text);
    CREATE TABLE entries (id bigserial PRIMARY KEY, account_id bigint REFERENCES accounts, amount bigint);
    CREATE TABLE notes (entry_id bigint REFERENCES entries ON DELETE CASCADE, note text);
    CREATE TABLE stock (sku text PRIMARY KEY, reserved bigint NOT NULL DEFAULT 0);
    CREATE TABLE parted (id bigint, day integer) PARTITION BY LIST (day);
    CREATE TABLE parted_1 PARTITION OF parted FOR VALUES IN (1);
    CREATE TABLE parted_2 PARTITION OF parted FOR VALUES IN (2);
    CREATE VIEW rich AS SELECT * FROM accounts WHERE balance > 1000;
    CREATE SEQUENCE shared;
    CREATE TABLE debits (number bigint DEFAULT nextval('shared'), amount bigint);
    CREATE TABLE credits (number bigint DEFAULT nextval('shared'), amount bigint);
    CREATE TABLE arrivals (id bigint, at timestamptz DEFAULT clock_timestamp());
    CREATE TABLE departures (id bigint, at timestamptz DEFAULT clock_timestamp());
    CREATE FUNCTION total() RETURNS numeric LANGUAGE sql AS 'SELECT sum(amount) FROM entries';
    CREATE FUNCTION worth(stock) RETURNS bigint LANGUAGE sql AS 'SELECT count(*) FROM entries';
    CREATE TABLE checked (id bigint CHECK (id < total()));
    CREATE TABLE defaulted (id bigint, total numeric DEFAULT total());
    CREATE TABLE indexed (id bigint);
    CREATE FUNCTION steady(bigint) RETURNS bigint IMMUTABLE LANGUAGE sql AS 'SELECT $1';
    CREATE INDEX ON indexed (steady(id));
    CREATE TABLE watched (id bigint);
    CREATE FUNCTION watch() RETURNS trigger LANGUAGE plpgsql AS '
        BEGIN INSERT INTO entries DEFAULT VALUES; RETURN NULL; END';
    CREATE TRIGGER watching AFTER INSERT ON watched FOR EACH ROW EXECUTE FUNCTION watch();
    CREATE TABLE stamped (id bigint, code text, updated_at timestamptz);
    CREATE FUNCTION stamp() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF TG_OP = 'UPDATE' AND NEW.code <> OLD.code THEN RAISE EXCEPTION 'no'; END IF; -- select nothing
            NEW.updated_at = now(); RETURN NEW;
        END $$;
    CREATE TRIGGER stamping BEFORE INSERT OR UPDATE ON stamped FOR EACH ROW EXECUTE FUNCTION stamp();
    CREATE TABLE numbered (id bigint PRIMARY KEY, note text);
    CREATE TABLE parts (numbered_id bigint REFERENCES numbered);
    CREATE FUNCTION number() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.id := NEW.id + 1; RETURN NEW; END';
    CREATE TRIGGER numbering BEFORE UPDATE ON numbered FOR EACH ROW EXECUTE FUNCTION number();
    CREATE TABLE summed (id bigint, total numeric);
    CREATE FUNCTION sum_up() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN NEW.total := total(); RETURN NEW; END';
    CREATE TRIGGER summing BEFORE INSERT ON summed FOR EACH ROW EXECUTE FUNCTION sum_up();
    CREATE TABLE picky (id bigint);
    CREATE TRIGGER stamping BEFORE INSERT ON picky FOR EACH ROW WHEN (NEW.id > 1) EXECUTE FUNCTION stamp();
    CREATE TABLE ruled (id bigint);
    CREATE RULE ruling AS ON INSERT TO ruled DO ALSO INSERT INTO entries DEFAULT VALUES;
    CREATE TABLE guarded (id bigint);
    ALTER TABLE guarded ENABLE ROW LEVEL SECURITY;
"""

BOOK = "INSERT INTO entries (account_id, amount) VALUES ($1, $2)"
MOVE = "UPDATE accounts SET balance = balance + $2 WHERE id = $1"
RESERVE = "UPDATE stock SET reserved = reserved + $2 WHERE sku = $1"

APART = [
    (BOOK, MOVE),
    (BOOK, RESERVE),
    (BOOK, "INSERT INTO entries_copy VALUES ($1) ON CONFLICT DO NOTHING"),
    (BOOK, 'UPDATE accounts SET "From" = $2, balance = 0 WHERE id = $1'),
    (BOOK, "UPDATE accounts a SET balance = u.b FROM unnest($1::bigint[], $2::bigint[]) AS u(id, b) WHERE a.id = u.id"),
    (BOOK, "WITH x AS (SELECT id FROM accounts WHERE id = $1 FOR UPDATE) UPDATE accounts SET balance = 1 FROM x"),
    (MOVE, "INSERT INTO stock (sku) VALUES ($1) ON CONFLICT (sku) DO UPDATE SET reserved = stock.reserved + 1"),
    ("INSERT INTO arrivals (id) VALUES ($1)", MOVE),
    ("INSERT INTO stock VALUES (gen_random_uuid()::text, random() * $1)", MOVE),
    ("INSERT INTO parted VALUES ($1, 1)", MOVE),
    ("SELECT sum(balance) FROM accounts", BOOK),
    ("UPDATE stamped SET code = $2 WHERE id = $1", MOVE),
]

TIED = [
    (MOVE, "UPDATE accounts SET balance = 0 WHERE code = $1"),
    (MOVE, "INSERT INTO stock SELECT code, balance FROM accounts WHERE id = $1"),
    (MOVE, "UPDATE stock SET reserved = (SELECT balance FROM accounts WHERE code = sku)"),
    (
        MOVE,
        "INSERT INTO stock VALUES ($1) ON CONFLICT (sku) DO UPDATE SET reserved = (SELECT max(balance) FROM accounts)",
    ),
    (BOOK, "INSERT INTO accounts (id) VALUES ($1)"),
    (BOOK, "INSERT INTO accounts (id) VALUES ($1) ON CONFLICT DO NOTHING"),
    (BOOK, "UPDATE accounts SET id = $2 WHERE id = $1"),
    (BOOK, "UPDATE accounts SET balance = 0, (code, id) = ($1, $2)"),
    (BOOK, "UPDATE accounts SET balance = (balance IS DISTINCT FROM 1)::int, id = $1"),
    (BOOK, 'UPDATE accounts SET "From" = $1, id = $2'),
    (BOOK, "INSERT INTO accounts VALUES ($1) ON CONFLICT (code) DO UPDATE SET id = excluded.id"),
    (BOOK, "DELETE FROM accounts WHERE id = $1"),
    (BOOK, "MERGE INTO accounts a USING stock ON a.code = sku WHEN MATCHED THEN DELETE"),
    (BOOK, "WITH x AS (DELETE FROM accounts RETURNING code) INSERT INTO stock SELECT code FROM x"),
    ("INSERT INTO notes VALUES ($1, $2)", "DELETE FROM accounts WHERE id = $1"),
    ("UPDATE notes SET note = $1", "DELETE FROM entries WHERE id = $1"),
    ("INSERT INTO parted_1 VALUES ($1, 1)", "UPDATE parted SET id = $1"),
    ("INSERT INTO debits (amount) VALUES ($1)", "INSERT INTO credits (amount) VALUES ($1)"),
    ("INSERT INTO arrivals (id) VALUES ($1)", "INSERT INTO departures (id) VALUES ($1)"),
    ("UPDATE numbered SET note = $1", "INSERT INTO parts VALUES ($1)"),
    ("SELECT last_value + $1 FROM entries_id_seq", BOOK),
]

# Each is tied to every other statement.
UNKNOWN = [
    "INSERT INTO watched VALUES ($1)",
    "INSERT INTO summed VALUES ($1)",
    "INSERT INTO picky VALUES ($1)",
    "INSERT INTO ruled VALUES ($1)",
    "INSERT INTO guarded VALUES ($1)",
    "INSERT INTO checked VALUES ($1)",
    "INSERT INTO defaulted VALUES ($1)",
    "INSERT INTO indexed VALUES ($1)",
    "INSERT INTO rich (id) VALUES ($1)",
    "INSERT INTO stock SELECT code FROM rich",
    "INSERT INTO stock VALUES ($1, total ())",
    'INSERT INTO stock VALUES ($1) ON CONFLICT (sku) DO UPDATE SET reserved = public."total"()',
    "UPDATE stock SET reserved = stock.worth",
    "SELECT nextval('shared')",
    "SELECT currval('entries_id_seq')",
    "SELECT set_config('search_path', $1, true)",
    "SELECT pg_notify('x', $1)",
    "SELECT query_to_xml('SELECT * FROM entries', true, true, $1)",
    "INSERT INTO stock SELECT name FROM pg_settings WHERE name = $1",
    "/* /* */ DELETE FROM */ SELECT 1",
    "TRUNCATE entries",
    "LOCK TABLE stock",
    "INSERT INTO no_such_table VALUES ($1)",
    "no statement at all",
]


@pytest.fixture
async def connection(empty_database: str) -> AsyncIterator[Connection]:
    connection = await asyncpg.connect(empty_database)
    await connection.execute(TABLES)
    await connection.execute("CREATE TABLE entries_copy (LIKE entries INCLUDING INDEXES)")
    yield connection
    assert not connection.is_in_transaction()
    await connection.close()


async def are_apart(connection: Connection, one: str, other: str) -> bool:
    first, second = await look_up(connection, one), await look_up(connection, other)
    assert first is not None, one
    assert second is not None, other
    apart = first.is_apart_from(second)
    assert apart == second.is_apart_from(first)
    return apart


async def test_statements_on_tables_that_nothing_ties_are_apart(connection: Connection) -> None:
    assert [pair for pair in APART if not await are_apart(connection, *pair)] == []


async def test_statements_that_meet_in_a_table_a_key_a_sequence_or_the_clock_are_tied(connection: Connection) -> None:
    assert [pair for pair in TIED if await are_apart(connection, *pair)] == []


async def test_what_cannot_be_judged_may_touch_anything(connection: Connection) -> None:
    assert [sql for sql in UNKNOWN if await look_up(connection, sql) is not None] == []


OPERATOR = """
    CREATE FUNCTION sneak(bigint, stock) RETURNS bigint LANGUAGE sql AS 'SELECT 1';
    CREATE OPERATOR + (FUNCTION = sneak, LEFTARG = bigint, RIGHTARG = stock)
"""
CAST = """
    CREATE FUNCTION sneak(stock) RETURNS bigint LANGUAGE sql AS 'SELECT 1';
    CREATE CAST (stock AS bigint) WITH FUNCTION sneak(stock)
"""
DOMAIN = """
    CREATE FUNCTION sneak(bigint) RETURNS bool LANGUAGE plpgsql AS 'BEGIN RETURN true; END';
    CREATE DOMAIN odd AS bigint CHECK (sneak(value))
"""


@pytest.mark.parametrize("changed", [OPERATOR, CAST, DOMAIN], ids=["operator", "cast", "domain"])
async def test_functions_that_no_text_names_leave_nothing_known(connection: Connection, changed: str) -> None:
    assert await look_up(connection, MOVE) is not None
    await connection.execute(changed)
    assert await look_up(connection, MOVE) is None


async def test_nobody_waits_for_a_table_that_is_being_changed(connection: Connection, empty_database: str) -> None:
    other = await asyncpg.connect(empty_database)
    try:
        await other.execute("BEGIN; LOCK TABLE stock IN ACCESS EXCLUSIVE MODE")
        assert await look_up(connection, RESERVE) is None
    finally:
        await other.close()
    assert await look_up(connection, RESERVE) is not None
