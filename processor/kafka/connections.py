"""librdkafka's log: one line when a broker goes and one when it is back, the rest at debug.

Each client of a process says of each broker, and again with every try, that it cannot connect; none says that it can
again. So the first failure is said for all of them, and from then on the broker is asked until it answers.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import structlog

log = structlog.get_logger()

# What we say ourselves when it matters: connections; and what is also raised to us: errors of a transaction, time-outs
# of requests and of our place in the group.
_SAID_BY_US = ("FAIL", "TXNERR", "GETPID", "ADDPARTS", "ADDOFFSETS", "REQTMOUT", "SESSTMOUT")
# `FAIL [rdkafka#consumer-1] [thrd:…]: what`
_LINE = re.compile(r"(?P<facility>[A-Z_]+) \[(?P<client>[^\]]*)\] (?:\[thrd:.*?\]: )?(?P<text>.*)", re.DOTALL)
# `127.0.0.1:9092/1: why`, `127.0.0.1:9092/bootstrap: why`, `GroupCoordinator: 127.0.0.1:9092: why`; and, without an
# address, `GroupCoordinator: why`.
_BROKER = re.compile(
    r"(?:\S+: )*(?:\w+://)?(?P<address>\S+?:\d+)(?:/(?P<id>\d+|bootstrap))?: (?P<reason>.*)", re.DOTALL
)
_ALL_DOWN = re.compile(r"\d+/\d+ brokers are down")


@dataclass(frozen=True, slots=True)
class Broker:
    address: str
    id: int | None  # not known of one that was only configured


@dataclass(slots=True)
class _Doubt:
    broker: Broker
    reason: str
    said: bool = False


class Brokers(logging.Filter):
    """What the clients of this process know of their brokers; may be called from any thread."""

    def __init__(self) -> None:
        super().__init__()
        self._doubts: dict[str, _Doubt] = {}  # by address
        self._changing = threading.Lock()

    @property
    def in_doubt(self) -> bool:
        """Whether there is a broker to ask."""
        return bool(self._doubts)

    def filter(self, record: logging.LogRecord) -> bool:
        if (line := _LINE.match(record.getMessage())) is not None:
            connection = _BROKER.match(line["text"])
            if connection is not None and line["facility"] == "FAIL":
                # Consumers are polled all the time. What a producer has to say comes with its next transaction, when it
                # may be long over. And a connection that is lost, which is no error, may be there again at once.
                certain = "#consumer-" in line["client"] and record.levelno >= logging.ERROR
                self._failed(connection, certain=certain)
            echo = line["facility"] == "ERROR" and (connection is not None or _ALL_DOWN.search(line["text"]))
            if echo or line["facility"] in _SAID_BY_US:
                record.levelno, record.levelname = logging.DEBUG, "DEBUG"
        return record.levelno >= logging.getLogger().level

    def ask(self, answering: Callable[[Iterable[Broker]], set[Broker]]) -> None:
        """Which of those in doubt answer; blocks."""
        with self._changing:
            asked = [doubt.broker for doubt in self._doubts.values()]
        answers = answering(asked)
        with self._changing:
            gone = [doubt for doubt in self._doubts.values() if doubt.broker in asked and doubt.broker not in answers]
            back = [doubt for doubt in self._doubts.values() if doubt.broker in answers]
            for doubt in back:
                del self._doubts[doubt.broker.address]
            self._say_gone([doubt for doubt in gone if not doubt.said])
        if said := sorted(doubt.broker.address for doubt in back if doubt.said):
            log.info("brokers_reachable", brokers=said)

    def _failed(self, connection: re.Match[str], *, certain: bool) -> None:
        broker = Broker(connection["address"], int(connection["id"]) if (connection["id"] or "").isdigit() else None)
        with self._changing:
            doubt = self._doubts.setdefault(broker.address, _Doubt(broker, connection["reason"]))
            if broker.id is not None:
                doubt.broker = broker
            if certain and not doubt.said:
                self._say_gone([doubt])

    def _say_gone(self, doubts: list[_Doubt]) -> None:
        for doubt in doubts:
            doubt.said = True
        if doubts:
            addresses = sorted(doubt.broker.address for doubt in doubts)
            log.warning("brokers_unreachable", brokers=addresses, reason=doubts[0].reason)


brokers = Brokers()
# For all clients that are polled. What the others have to say would come when they are closed.
logger = logging.getLogger("librdkafka")
logger.addFilter(brokers)
silent = logging.Logger("librdkafka.silent", level=logging.CRITICAL + 1)
