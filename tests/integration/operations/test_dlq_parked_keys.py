"""`processor dlq redrive` of parked keys; what the service would do is done here by hand."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from confluent_kafka import TopicPartition

from tests.support import sql
from tests.support.shop import READ_SECONDS, Shop, park, reading, redrive_id


class Service:
    """Reads the input topic and does to the rows what the engine does."""

    def __init__(self, shop: Shop) -> None:
        self._shop = shop
        self._consumer = reading(shop)
        self._consumer.assign([TopicPartition(shop.topic, 0, 0)])
        self.applied: list[str] = []

    def close(self) -> None:
        self._consumer.close()

    def next(self, *, fails: bool = False) -> str:
        message = self._consumer.poll(READ_SECONDS)
        assert message is not None, "nothing was sent"
        id_ = redrive_id(message).partition(":")[2]
        head = sql.value(
            self._shop.database, 'SELECT message_id FROM inbox WHERE parked_key IS NOT NULL ORDER BY "offset" LIMIT 1'
        )
        if id_ != head:
            change = "redriven_at = NULL"
        elif fails:
            change = "status = 'failed', finished_at = now(), redriven_at = NULL"
        else:
            change = "status = 'completed', parked_key = NULL, redriven_at = NULL"
            self.applied.append(id_)
        both = f"""
            WITH gone AS (UPDATE ledger SET next_offset = $2 WHERE partition_id = $3)
            UPDATE inbox SET {change} WHERE message_id = $1
        """
        sql.execute(self._shop.database, both, id_, (message.offset() or 0) + 1, self._shop.sources[0])
        return id_


@pytest.fixture
def service(shop: Shop) -> Iterator[Service]:
    made = Service(shop)
    yield made
    made.close()


def test_parked_key_is_sent_as_a_whole_and_followed_until_it_is_free(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4, 5)
    process = shop.start("redrive", "--id", "m4")
    assert [service.next() for _ in range(3)] == ["m3", "m4", "m5"]
    stdout, stderr = process.communicate(timeout=30)
    assert (process.returncode, stdout) == (0, "3 sent: 3 completed, 0 failed again\nfreed 1 parked key\n"), stderr
    assert service.applied == ["m3", "m4", "m5"]


def test_what_is_parked_meanwhile_is_sent_too(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4)
    process = shop.start("redrive", "--key", "k")
    assert service.next() == "m3"
    park(shop, 5, 6)
    assert [service.next() for _ in range(3)] == ["m4", "m5", "m6"]
    assert process.wait(30) == 0
    assert service.applied == ["m3", "m4", "m5", "m6"]


def test_head_that_fails_again_ends_it_and_leaves_the_rest_parked(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4)
    process = shop.start("redrive", "--key", "k")
    assert service.next(fails=True) == "m3"
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "failed again: m3" in stderr
    assert (shop.stored("m3")["status"], shop.stored("m4")["status"]) == ("failed", "parked")


def test_message_that_came_before_its_turn_is_sent_again_when_it_has_come(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    park(shop, 4)
    assert shop.send("--key", "k")["keys_still_parked"] == 1
    assert service.next(fails=True) == "m3"
    assert service.next() == "m4", "passed over"
    process = shop.start("redrive", "--key", "k")
    assert [service.next(), service.next()] == ["m3", "m4"]
    assert process.wait(30) == 0
    assert service.applied == ["m3", "m4"]


def test_row_that_the_service_went_past_without_touching_it_is_sent_again(shop: Shop, service: Service) -> None:
    shop.row("m3", 3, parked_key=b"k")
    assert shop.send("--key", "k")["sent"] == 1
    assert shop.send("--key", "k")["sent"] == 0, "it is on its way"
    sql.execute(shop.database, "UPDATE ledger SET next_offset = 1 WHERE partition_id = $1", shop.sources[0])
    assert shop.send("--key", "k")["sent"] == 1


def test_a_service_that_does_not_run_is_reported_after_the_timeout(shop: Shop) -> None:
    shop.row("m3", 3, parked_key=b"k")
    done = shop.dlq("redrive", "--key", "k", "--timeout", "0.5")
    assert done.returncode == 1
    assert "nothing has moved for 0.5 s: the service seems not to be running" in done.stderr
    assert shop.redriven() == 1
