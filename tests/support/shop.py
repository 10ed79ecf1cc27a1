"""A deployment whose failed and parked messages are rows that the test writes itself."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import struct
import subprocess
import sys
import termios
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, Message, TopicPartition

from tests.conftest import unique
from tests.support import command, sql

NOW = datetime.now(UTC)
READ_SECONDS = 30.0

INSERT = """
    INSERT INTO inbox (key, partition_id, "offset", payload_hash, status, message_id, type, record_key, payload,
                       headers, error, finished_at, first_failed_at, parked_key, attempts, history)
    VALUES (inbox_key($1, $2), $3, $4, 0, $5::text::inbox_status, $2, $6, $7, $8, $9, $10, $11, $11, $12, 2, $13)
"""
FAILED = [{"at": "2025-01-01T00:00:00+00:00", "event": "failed", "class": "poison", "reason": "rejected"}]


@dataclass
class Shop:
    """A deployment with partitions in its ledger, and rows as the engine leaves them."""

    folder: Path
    consumer: str
    topic: str
    database: str
    bootstrap_servers: str
    sources: list[int]
    running: list[subprocess.Popen[str]] = field(default_factory=list)

    def row(
        self,
        message_id: str,
        offset: int,
        *,
        partition: int = 0,
        status: str = "failed",
        type_: str | None = "T",
        key: bytes | None = b"k",
        payload: bytes | None = b"{}",
        headers: list[Any] | None = None,
        error: dict[str, Any] | None = None,
        at: datetime = NOW,
        parked_key: bytes | None = None,
    ) -> None:
        error = {"class": "poison", "reason": "rejected", "message": "no", "traceback": None} | (error or {})
        failed = status != "parked"
        sql.execute(
            self.database,
            INSERT,
            self.consumer,
            message_id,
            self.sources[partition],
            offset,
            status,
            type_,
            key,
            payload,
            json.dumps(headers or []),
            json.dumps(error) if failed else None,
            at if failed else None,
            parked_key,
            json.dumps(FAILED),
        )

    def completed(self, message_id: str, offset: int) -> None:
        """As it is after a first attempt that went well: known by its key alone."""
        self.row(message_id, offset, status="completed", type_=None)
        sql.execute(self.database, "UPDATE inbox SET message_id = NULL WHERE message_id = $1", message_id)

    def identify(self, **message: Any) -> None:
        """How messages are recognised: settings of the table [message]."""
        lines = [f"{name} = {json.dumps(value)}" for name, value in message.items()]
        with (self.folder / "shop.toml").open("a") as file:
            file.write("\n".join(["\n[message]", *lines, ""]))

    def many(self, number: int) -> None:
        sql.execute(
            self.database,
            """INSERT INTO inbox (key, partition_id, "offset", payload_hash, status, message_id, type, record_key,
                                  payload, headers, error, finished_at)
               SELECT inbox_key($1, 'm' || n), $2, n, 0, 'failed', 'm' || n, 'T', 'k', convert_to('m' || n, 'UTF8'),
                      '[]', '{"class": "poison", "reason": "rejected"}', now()
               FROM generate_series(0, $3 - 1) n""",
            self.consumer,
            self.sources[0],
            number,
        )

    def dlq(self, verb: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        return command.processor(self.folder, "dlq", verb, "shop.toml", *arguments, environ=environ)

    def json(self, verb: str, *arguments: str) -> Any:
        done = self.dlq(verb, *arguments, "--json")
        assert done.stderr == ""
        return json.loads(done.stdout)

    def lines(self, verb: str, *arguments: str) -> list[Any]:
        done = self.dlq(verb, *arguments, "-o", "jsonl")
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in done.stdout.splitlines()]

    def send(self, *arguments: str) -> Any:
        """Redrive without a service that could take anything."""
        return self.json("redrive", *arguments, "--no-wait")

    def ids(self, *filters: str) -> list[str]:
        return [message["id"] for message in self.json("list", *filters)["messages"]]

    def start(self, verb: str, *arguments: str) -> subprocess.Popen[str]:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
        process = subprocess.Popen(
            [sys.executable, "-m", "processor", "dlq", verb, "shop.toml", *arguments],
            cwd=self.folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.running.append(process)
        return process

    def stored(self, message_id: str) -> Any:
        (row,) = sql.fetch(self.database, "SELECT * FROM inbox WHERE message_id = $1", message_id)
        return row

    def redriven(self) -> int:
        found: int = sql.value(self.database, "SELECT count(*) FROM inbox WHERE redriven_at IS NOT NULL")
        return found

    def records(self) -> list[Message]:
        """All that is in the input topic, in the order of each partition."""
        with reading(self) as consumer:
            places = [TopicPartition(self.topic, number, 0) for number in range(len(self.sources))]
            left = sum(consumer.get_watermark_offsets(place, READ_SECONDS)[1] for place in places)
            consumer.assign(places)
            found = []
            while left:
                message = consumer.poll(READ_SECONDS)
                assert message is not None
                assert message.error() is None
                found.append(message)
                left -= 1
            return found


def reading(shop: Shop) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": shop.bootstrap_servers,
            "group.id": unique("reader"),
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )


def headers(message: Message) -> list[tuple[str, bytes | None]]:
    found: Any = message.headers()  # declared as a mapping, which could not hold the same name twice
    return found or []


def redrive_id(message: Message) -> str:
    name, value = headers(message)[-1]
    assert name == "processor-redrive"
    assert value is not None
    return value.decode()


def sent_ids(shop: Shop) -> list[str]:
    return [redrive_id(message).removeprefix(f"{shop.consumer}:") for message in shop.records()]


def on_terminal(shop: Shop, answer: str, verb: str, *arguments: str) -> tuple[int, str]:
    """Exit code and everything that was shown."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 200, 0, 0))
    os.write(ours, answer.encode())
    process = subprocess.Popen(
        [sys.executable, "-m", "processor", "dlq", verb, "shop.toml", *arguments],
        cwd=shop.folder,
        env={name: value for name, value in os.environ.items() if not name.startswith("PROCESSOR_")}
        | {"TERM": "xterm-256color"},
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = b""
    with suppress(OSError):  # how Linux says that the other side has gone
        while piece := os.read(ours, 65_536):
            shown += piece
    os.close(ours)
    return process.wait(30), shown.decode()


def park(shop: Shop, *offsets: int) -> None:
    for offset in offsets:
        shop.row(f"m{offset}", offset, status="parked", parked_key=b"k")
