"""How stored outputs are cut into portions: never where an offset could not say what was sent."""

from __future__ import annotations

import pytest

from processor.engine.partitions import OwnedPartition
from processor.engine.portions import OUTPUT_OVERHEAD, Piece, portions, split
from processor.kafka.producer import Offset
from processor.messages.outputs import EncodedOutputs, Outgoing
from tests.unit.engine.given import owned_partition

ONE = OUTPUT_OVERHEAD + 10


def parcel(*offsets: int) -> EncodedOutputs:
    return EncodedOutputs.of([Outgoing(offset, "out", None, b"0123456789", "cause", 0, "id") for offset in offsets])


def parts(offsets: list[int], limit: int) -> list[tuple[list[int], int | None]]:
    return [(part.offsets, below) for part, below, _ in split(parcel(*offsets), limit)]


@pytest.mark.parametrize(
    ("offsets", "limit", "expected"),
    [
        ([], ONE, [([], None)]),
        ([4, 5, 9], 100 * ONE, [([4, 5, 9], None)]),
        ([4, 5, 9], 2 * ONE, [([4, 5], 6), ([9], None)]),
        ([4, 5, 9], ONE, [([4], 5), ([5], 6), ([9], None)]),
        ([4, 5, 9], 1, [([4], 5), ([5], 6), ([9], None)]),
        # All that one record has caused goes out together.
        ([4, 4, 4, 9], 2 * ONE, [([4, 4, 4], 5), ([9], None)]),
        ([4, 7, 7, 7, 9], 2 * ONE, [([4], 5), ([7, 7, 7], 8), ([9], None)]),
        # A handler may give its outputs in an order of its own.
        ([5, 4, 7, 6, 9], 3 * ONE, [([5, 4], 6), ([7, 6, 9], None)]),
        ([9, 8, 7], ONE, [([9, 8, 7], None)]),
    ],
)
def test_portions_keep_the_order_and_end_where_an_offset_says_what_is_sent(
    offsets: list[int], limit: int, expected: list[tuple[list[int], int | None]]
) -> None:
    assert parts(offsets, limit) == expected


def test_portions_say_how_large_they_are() -> None:
    assert [size for _, _, size in split(parcel(*range(7)), 3 * ONE)] == [3 * ONE, 3 * ONE, ONE]


def piece(owner: OwnedPartition, size: int) -> Piece:
    return Piece(owner, EncodedOutputs.of(), Offset(owner.partition, 1, ""), size)


@pytest.mark.parametrize(
    ("pieces", "limit", "together", "expected"),
    [
        ([], 10, True, []),
        ([(0, 3), (0, 3), (1, 4)], 10, True, [[(0, 3), (0, 3), (1, 4)]]),
        ([(0, 3), (0, 3), (1, 5)], 10, True, [[(0, 3), (0, 3)], [(1, 5)]]),
        ([(0, 3), (0, 3), (1, 4), (1, 4)], 10, False, [[(0, 3), (0, 3)], [(1, 4), (1, 4)]]),
        ([(0, 6), (0, 6), (1, 4)], 10, False, [[(0, 6)], [(0, 6)], [(1, 4)]]),
        # What cannot be cut goes out whole, however large it is; and an offset without outputs costs nothing.
        ([(0, 99), (0, 1), (1, 0)], 10, True, [[(0, 99)], [(0, 1), (1, 0)]]),
        ([(0, 10), (1, 0), (2, 0)], 10, True, [[(0, 10), (1, 0), (2, 0)]]),
    ],
)
def test_pieces_go_out_together_up_to_the_limit_and_each_partition_by_itself_where_one_may_be_at_fault(
    pieces: list[tuple[int, int]], limit: int, together: bool, expected: list[list[tuple[int, int]]]
) -> None:
    owners = [owned_partition(number) for number in range(3)]
    given = [piece(owners[number], size) for number, size in pieces]
    found = list(portions(given, limit, together=together))
    assert [[(one.partition.partition.number, one.size) for one in portion] for portion in found] == expected
    assert [one for portion in found for one in portion] == given
