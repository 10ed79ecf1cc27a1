"""Which stored outputs the ledger may forget: those that Kafka is known to have, and no others."""

from __future__ import annotations

from processor.engine.housekeeping import Housekeeping
from processor.engine.partitions import OwnedPartition
from processor.postgres.ledger import Advance, Sent
from tests.unit.engine.given import UNUSED, owned_partition


def housekeeping() -> Housekeeping:
    return Housekeeping(UNUSED, UNUSED, UNUSED, UNUSED, UNUSED, UNUSED)


def partition(number: int = 0, published: int = 0) -> OwnedPartition:
    owned = owned_partition(number)
    owned.ledger_id, owned.epoch, owned.published = 7 + number, 3, published
    return owned


def stored(keeping: Housekeeping, owned: OwnedPartition, up_to: int, outputs: bytes | None = b"stored") -> None:
    """A batch of a partition was committed."""
    keeping.stored({owned: Advance(owned.partition, owned.epoch, 0, up_to, outputs, owned.published, False)})


def test_outputs_are_forgotten_once_kafka_is_known_to_have_all_of_them() -> None:
    keeping, owned = housekeeping(), partition(published=5)
    stored(keeping, owned, up_to=10)
    assert keeping.sent() == {owned: Sent(7, 3, 5)}
    keeping.forgotten(keeping.sent())
    assert keeping.sent() == {owned: Sent(7, 3, 5)}, "5 to 9 may not be in Kafka yet"
    owned.published = 10
    sent = keeping.sent()
    assert sent == {owned: Sent(7, 3, 10)}
    keeping.forgotten(sent)
    assert keeping.sent() == {}


def test_outputs_of_a_later_batch_are_not_forgotten_with_those_of_an_earlier_one() -> None:
    keeping, owned = housekeeping(), partition(published=10)
    stored(keeping, owned, up_to=10)
    sent = keeping.sent()
    stored(keeping, owned, up_to=20)
    keeping.forgotten(sent)
    assert keeping.sent() == {owned: Sent(7, 3, 10)}


def test_batch_without_outputs_leaves_nothing_to_forget() -> None:
    keeping, owned = housekeeping(), partition()
    stored(keeping, owned, up_to=10, outputs=None)
    assert keeping.sent() == {}


def test_outputs_of_a_partition_that_is_lost_or_starts_over_are_left_to_its_recovery() -> None:
    keeping, lost, over, kept = housekeeping(), partition(0), partition(1), partition(2)
    for owned in (lost, over, kept):
        stored(keeping, owned, up_to=10)
    lost.assignment.owned = False
    keeping.left_to_recovery([over, partition(3)])
    assert list(keeping.sent()) == [kept]
