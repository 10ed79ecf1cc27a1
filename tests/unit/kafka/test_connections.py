"""Lines as librdkafka 2.16 has logged them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from processor.kafka.connections import Broker, Brokers

REFUSED = (
    "FAIL [invoicing#consumer-{n}] [thrd:127.0.0.1:9092/1]: 127.0.0.1:9092/1:"
    " Connect to ipv4#127.0.0.1:9092 failed: Connection refused (after 0ms in state CONNECT)"
)
REFUSED_BOOTSTRAP = REFUSED.replace("/1", "/bootstrap")
REFUSED_COORDINATOR = (
    "FAIL [invoicing#consumer-4] [thrd:GroupCoordinator]: GroupCoordinator: 127.0.0.1:9092:"
    " Connect to ipv4#127.0.0.1:9092 failed: Connection refused (after 0ms in state CONNECT)"
)
REFUSED_PRODUCER = REFUSED.replace("#consumer-{n}", "#producer-3")
REFUSED_TLS = (
    "FAIL [invoicing#consumer-1] [thrd:sasl_ssl://kafka:9093/bootstrap]: sasl_ssl://kafka:9093/bootstrap:"
    " Failed to resolve 'kafka:9093': Name or service not known (after 3ms in state CONNECT)"
)
SECOND_BROKER = REFUSED.replace("9092/1", "9093/2").replace("9092", "9093")
ERROR = (
    "ERROR [invoicing#consumer-1] [thrd:app]: invoicing#consumer-1: 127.0.0.1:9092/1: Connect to ipv4#127.0.0.1:9092"
)
ERROR_COORDINATOR = "ERROR [i#consumer-4] [thrd:app]: i#consumer-4: GroupCoordinator: 127.0.0.1:9092: Connect to failed"
ALL_DOWN = "ERROR [invoicing#consumer-1] [thrd:app]: invoicing#consumer-1: 1/1 brokers are down"
LOST = (
    "FAIL [invoicing#consumer-1] [thrd:127.0.0.1:9092/1]: 127.0.0.1:9092/1:"
    " Disconnected: connection closed by peer: receive 0 after POLLIN (after 1296ms in state UP)"
)
WITHOUT_ADDRESS = (
    "FAIL [invoicing#consumer-1] [thrd:GroupCoordinator]: GroupCoordinator:"
    " Disconnected: connection closed by peer: receive 0 after POLLIN (after 1718ms in state UP)"
)
TIMED_OUT = (
    "REQTMOUT [invoicing#consumer-1] [thrd:127.0.0.1:9092/1]: 127.0.0.1:9092/1:"
    " Timed out 1 in-flight, 0 retry-queued, 0 out-queue, 0 partially-sent requests"
)
GENERATION = (
    "TXNERR [invoicing#producer-3] [thrd:main]: Current transaction failed in state BeginCommit:"
    " Failed to commit offsets to transaction: Broker: Specified group generation id is not valid (ILLEGAL_GENERATION)"
)
SESSION = (
    "SESSTMOUT [invoicing#consumer-4] [thrd:main]: Consumer group session timed out (in join-state steady) after"
    " 1507 ms without a successful response from the group coordinator (broker -1, last error was Success)"
)
TOKEN = "ERROR [invoicing#consumer-1] [thrd:app]: invoicing#consumer-1: Failed to acquire SASL OAUTHBEARER token: no"
FATAL = "FATAL [invoicing#producer-3] [thrd:main]: Fatal error: Broker: Producer fenced by newer producer"


@pytest.fixture
def said() -> Iterator[list[Any]]:
    with capture_logs() as events:
        yield events


def hear(brokers: Brokers, line: str, level: int = logging.ERROR) -> int:
    record = logging.LogRecord("librdkafka", level, "", 0, "%s", (line,), None)
    brokers.filter(record)
    return record.levelno


def answering(*addresses: str) -> Any:
    def ask(brokers: Iterable[Broker]) -> set[Broker]:
        return {broker for broker in brokers if broker.address in addresses}

    return ask


def test_broker_away_is_said_once_for_all_clients_and_so_is_its_return(said: list[Any]) -> None:
    brokers = Brokers()
    lines = [REFUSED.format(n=n) for n in (1, 4, 2)] * 30
    lines += [REFUSED_BOOTSTRAP.format(n=1), REFUSED_COORDINATOR, REFUSED_PRODUCER, ERROR, ERROR_COORDINATOR, ALL_DOWN]
    assert {hear(brokers, line) for line in lines} == {logging.DEBUG}
    for _ in range(3):
        brokers.ask(answering())
    reason = "Connect to ipv4#127.0.0.1:9092 failed: Connection refused (after 0ms in state CONNECT)"
    away = {"event": "brokers_unreachable", "log_level": "warning", "brokers": ["127.0.0.1:9092"], "reason": reason}
    assert said == [away]
    brokers.ask(answering("127.0.0.1:9092"))
    assert not brokers.in_doubt
    back = {"event": "brokers_reachable", "log_level": "info", "brokers": ["127.0.0.1:9092"]}
    assert said == [away, back]
    hear(brokers, REFUSED.format(n=1))
    assert said == [away, back, away]


def test_each_broker_is_said_by_itself(said: list[Any]) -> None:
    brokers = Brokers()
    hear(brokers, REFUSED.format(n=1))
    hear(brokers, SECOND_BROKER.format(n=1))
    brokers.ask(answering("127.0.0.1:9093"))
    assert [(event["event"], event["brokers"]) for event in said] == [
        ("brokers_unreachable", ["127.0.0.1:9092"]),
        ("brokers_unreachable", ["127.0.0.1:9093"]),
        ("brokers_reachable", ["127.0.0.1:9093"]),
    ]
    assert brokers.in_doubt


def test_broker_is_asked_by_the_id_that_is_known_of_its_address(said: list[Any]) -> None:
    brokers = Brokers()
    for line in (REFUSED_BOOTSTRAP.format(n=1), REFUSED.format(n=1), REFUSED_COORDINATOR):
        hear(brokers, line)
    brokers.ask(lambda asked: {broker for broker in asked if broker == Broker("127.0.0.1:9092", 1)})
    assert not brokers.in_doubt
    assert [event["event"] for event in said] == ["brokers_unreachable", "brokers_reachable"]


@pytest.mark.parametrize(("line", "level"), [(LOST, logging.INFO), (REFUSED_PRODUCER, logging.ERROR)])
def test_what_may_be_over_already_is_said_only_if_the_broker_does_not_answer(
    said: list[Any], line: str, level: int
) -> None:
    brokers = Brokers()
    assert hear(brokers, line, level) == logging.DEBUG
    brokers.ask(answering("127.0.0.1:9092"))
    assert said == []
    assert not brokers.in_doubt
    hear(brokers, line, level)
    brokers.ask(answering())
    assert [event["event"] for event in said] == ["brokers_unreachable"]


def test_address_is_found_behind_the_protocol_too(said: list[Any]) -> None:
    hear(Brokers(), REFUSED_TLS)
    (away,) = said
    assert away["brokers"] == ["kafka:9093"]
    assert away["reason"].startswith("Failed to resolve 'kafka:9093'")


@pytest.mark.parametrize("line", [GENERATION, SESSION, TIMED_OUT, WITHOUT_ADDRESS])
def test_what_we_say_ourselves_is_at_debug_and_puts_no_broker_in_doubt(said: list[Any], line: str) -> None:
    brokers = Brokers()
    assert hear(brokers, line) == logging.DEBUG
    assert not brokers.in_doubt
    assert said == []


@pytest.mark.parametrize("line", [TOKEN, FATAL, "something else"])
def test_what_nobody_else_says_keeps_its_level(said: list[Any], line: str) -> None:
    brokers = Brokers()
    assert hear(brokers, line) == logging.ERROR
    assert not brokers.in_doubt
    assert said == []
