"""Arrays as arguments of statements: whatever form they are sent in, Postgres gets what the handler gave."""

from __future__ import annotations

import copy
import pickle
import uuid
from collections.abc import AsyncIterator, Callable
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
import pytest

from processor.postgres.arrays import SCALARS, WORTH_IT, Arrays, Flat

if TYPE_CHECKING:
    Connection: TypeAlias = asyncpg.Connection[asyncpg.Record]

# By Postgres' name of the elements' type.
ELEMENTS: dict[str, list[Any]] = {
    "boolean": [True, False, None],
    "bytea": [b"", b"\0\xff", None],
    "date": [date(2026, 2, 28), None],
    "timestamptz": [datetime(2026, 2, 28, 12, tzinfo=UTC), None],
    "time": [time(23, 59, 59), None],
    "interval": [timedelta(days=1, seconds=2), None],
    "numeric": [Decimal("0.10"), Decimal("-1e30"), None],
    "float8": [0.5, -1e300, None],
    "bigint": [2**63 - 1, -(2**63), None],
    "integer": [1, 0, -1],
    "text": ["", "é", "{,}", 'a"b\\', None],
    "uuid": [uuid.UUID(int=7), None],
}


@pytest.fixture
async def connection(database: str) -> AsyncIterator[Connection]:
    connection: Connection = await asyncpg.connect(database)
    try:
        yield connection
    finally:
        await connection.close()


def test_every_scalar_is_tried() -> None:
    assert {type(element) for elements in ELEMENTS.values() for element in elements} == SCALARS


@pytest.mark.parametrize("type_", ELEMENTS)
async def test_an_array_arrives_whole_and_in_order_however_often_it_is_sent(connection: Connection, type_: str) -> None:
    arrays = await Arrays.suited(connection)
    elements = ELEMENTS[type_] * WORTH_IT
    statement = await connection.prepare(f"SELECT $1::{type_}[]")
    (argument,) = arrays.arguments(statement, (elements,))
    assert type(argument) is Flat, "the asyncpg that is installed goes about arrays in another way: see arrays.py"
    assert [await statement.fetchval(argument) for _ in range(3)] == [elements] * 3


WIDE = ", ".join(f"c{n} integer" for n in range(WORTH_IT))

LEFT_ALONE: dict[str, tuple[str, Any]] = {
    "nested": ("integer[]", [[1, 2]] * WORTH_IT),
    "a tuple": ("integer[]", (1,) * WORTH_IT),
    "records": ("wide[]", [tuple(range(WORTH_IT))] * WORTH_IT),
    "one record": ("wide", list(range(WORTH_IT))),
    "a text": ("text", "x" * WORTH_IT),
    "nothing": ("integer[]", None),
}


@pytest.mark.parametrize("what", LEFT_ALONE)
async def test_anything_but_an_array_of_many_scalars_is_left_as_it_is(connection: Connection, what: str) -> None:
    await connection.execute(f"CREATE TYPE wide AS ({WIDE})")
    arrays = await Arrays.suited(connection)
    type_, value = LEFT_ALONE[what]
    statement = await connection.prepare(f"SELECT to_jsonb($1::{type_}), $2::integer[]")
    expected = await statement.fetchval(value, [])
    left_alone, spared = arrays.arguments(statement, (value, [1] * WORTH_IT))
    assert left_alone is value
    assert type(spared) is Flat
    assert [tuple(row) for row in await statement.fetch(left_alone, spared)] == [(expected, [1] * WORTH_IT)]


async def test_an_element_of_the_wrong_type_is_refused_as_in_a_list(connection: Connection) -> None:
    arrays = await Arrays.suited(connection)
    wrong = [*range(WORTH_IT), "x"]
    statement = await connection.prepare("SELECT $1::integer[]")
    told = []
    for arguments in (arrays.arguments(statement, (wrong,)), (wrong,)):
        with pytest.raises(asyncpg.DataError) as refused:
            await statement.fetchval(*arguments)
        told.append(str(refused.value))
    assert told[0] == told[1]
    assert await connection.fetchval("SELECT 1") == 1


async def test_few_elements_are_not_worth_a_look(connection: Connection) -> None:
    arrays = await Arrays.suited(connection)
    values = ([1] * (WORTH_IT - 1),)
    assert arrays.arguments(await connection.prepare("SELECT $1::integer[]"), values) is values


async def test_a_wrong_number_of_arguments_is_left_to_asyncpg(connection: Connection) -> None:
    arrays = await Arrays.suited(connection)
    statement = await connection.prepare("SELECT $1::integer[]")
    values = ([1] * WORTH_IT, 2)
    assert arrays.arguments(statement, values) is values


def test_a_copy_is_a_plain_list_and_leaves_the_original_as_it_is() -> None:
    original = Flat([1, 2, 3])
    for copied in (pickle.loads(pickle.dumps(original)), copy.copy(original), copy.deepcopy(original)):
        assert type(copied) is list
        assert copied == [1, 2, 3]
    assert [list(original), list(original)] == [[], [1, 2, 3]]


class Otherwise:
    """An asyncpg that goes about arrays in another way."""

    def __init__(self, connection: Connection, look_at: Callable[[list[Any]], list[Any]]) -> None:
        self._connection = connection
        self._look_at = look_at

    async def fetchval(self, query: str, array: list[Any]) -> Any:
        return await self._connection.fetchval(query, self._look_at(array))


def _look_once_more(array: list[Any]) -> list[Any]:
    iter(array)
    return array


@pytest.mark.parametrize("look_at", [list, _look_once_more], ids=["one walk", "three walks"])
async def test_a_library_that_walks_otherwise_gets_plain_lists(
    connection: Connection, look_at: Callable[[list[Any]], list[Any]]
) -> None:
    arrays = await Arrays.suited(Otherwise(connection, look_at))  # type: ignore[arg-type]
    statement = await connection.prepare("SELECT $1::integer[]")
    values = ([1] * WORTH_IT,)
    assert arrays.arguments(statement, values) is values
    assert await statement.fetchval(*values) == values[0]
