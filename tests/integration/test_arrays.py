"""Arrays as arguments of statements: whatever form they are sent in, Postgres gets what the handler gave."""

from __future__ import annotations

import copy
import pickle
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias

import asyncpg
import pytest

from processor.arrays import SCALARS, WORTH_IT, Arrays, Flat

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
    argument = arrays.argument(elements)
    assert type(argument) is Flat, "the asyncpg that is installed goes about arrays in another way: see arrays.py"
    statement = await connection.prepare(f"SELECT $1::{type_}[]")
    assert [await statement.fetchval(argument) for _ in range(3)] == [elements] * 3


@pytest.mark.parametrize(
    "value",
    [
        [[1, 2]] * WORTH_IT,
        [(1, 2)] * WORTH_IT,
        [1] * (WORTH_IT - 1),
        (1,) * WORTH_IT,
        {"a": [1] * WORTH_IT},
        "text",
        None,
    ],
    ids=["nested", "records", "short", "a tuple", "an object", "a text", "nothing"],
)
async def test_anything_but_a_list_of_many_scalars_is_left_as_it_is(connection: Connection, value: Any) -> None:
    arrays = await Arrays.suited(connection)
    assert arrays.argument(value) is value
    assert arrays.arguments((value, 1))[0] is value


async def test_an_element_of_the_wrong_type_is_refused_as_in_a_list(connection: Connection) -> None:
    arrays = await Arrays.suited(connection)
    wrong = [*range(WORTH_IT), "x"]
    told = []
    for argument in (arrays.argument(wrong), wrong):
        with pytest.raises(asyncpg.DataError) as refused:
            await connection.fetchval("SELECT $1::integer[]", argument)
        told.append(str(refused.value))
    assert told[0] == told[1]
    assert await connection.fetchval("SELECT 1") == 1


def test_a_copy_is_a_plain_list_and_leaves_the_original_as_it_is() -> None:
    original = Flat([1, 2, 3])
    for copied in (pickle.loads(pickle.dumps(original)), copy.copy(original), copy.deepcopy(original)):
        assert type(copied) is list
        assert copied == [1, 2, 3]
    assert [list(original), list(original)] == [[], [1, 2, 3]]


class Walker:
    """An asyncpg of some other version."""

    def __init__(self, walks: int) -> None:
        self._walks = walks

    async def fetchval(self, _query: str, array: list[Any]) -> list[Any]:
        return [list(array) for _ in range(self._walks)][-1]


class Announcer:
    """An asyncpg that tells Postgres how many elements come, and finds them gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def fetchval(self, query: str, array: list[Any]) -> Any:
        iter(array)
        return await self._connection.fetchval(query, array)


async def test_a_library_that_finds_the_elements_gone_gets_plain_lists(connection: Connection) -> None:
    arrays = await Arrays.suited(Announcer(connection))  # type: ignore[arg-type]
    elements = [1] * WORTH_IT
    assert arrays.argument(elements) is elements
    assert await connection.fetchval("SELECT $1::integer[]", elements) == elements


@pytest.mark.parametrize(("walks", "spared"), [(1, False), (2, True), (3, False)])
async def test_a_library_that_walks_otherwise_gets_plain_lists(walks: int, spared: bool) -> None:
    arrays = await Arrays.suited(Walker(walks))  # type: ignore[arg-type]
    assert (type(arrays.argument([1] * WORTH_IT)) is Flat) is spared
