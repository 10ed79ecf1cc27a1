"""One deployment per test: its own topics, group, database and configuration file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from confluent_kafka import ConsumerGroupState, KafkaException
from confluent_kafka.admin import AdminClient

from tests.support.feed import DUPLICATES, Feed
from tests.support.verifier import Verifier
from tests.support.waiting import eventually

PROJECT = Path(__file__).resolve().parents[2]
MIGRATIONS = PROJECT / "handlers" / "migrations"

# What a handler raises fails its message at once, into its row and nowhere else, unless a test says otherwise.
FAILING: dict[str, dict[str, Any]] = {
    "retry": {"attempts": 1, "first_delay_ms": 20, "max_delay_ms": 200},
    "failure": {"dead_letter_topic": ""},
}


@dataclass(frozen=True)
class Deployment:
    config: Path
    consumer: str
    input_topic: str
    output_topic: str
    database: str
    bootstrap_servers: str
    partitions: int
    dead_letter_topic: str
    environment: dict[str, str] = field(default_factory=dict)

    def feed(self, *, skus: int = 5, duplicates: float = DUPLICATES) -> Feed:
        return Feed(self.bootstrap_servers, self.input_topic, self.partitions, skus=skus, duplicates=duplicates)

    def wait_until_shared(self, *sizes: int) -> None:
        """Until the group is at rest, and its members have so many partitions each."""
        admin = AdminClient({"bootstrap.servers": self.bootstrap_servers, "log_level": 0})

        def shared() -> bool:
            try:
                group = admin.describe_consumer_groups([self.consumer])[self.consumer].result()
            except KafkaException:
                return False  # its coordinator is only just being chosen
            found = sorted(len(member.assignment.topic_partitions) for member in group.members)
            return group.state is ConsumerGroupState.STABLE and found == sorted(sizes)

        eventually(shared, 30, f"members with {sizes} partitions")

    def verifier(self) -> Verifier:
        return Verifier(self.bootstrap_servers, self.input_topic, self.output_topic, self.consumer, self.database)


def settings(protocol: str, handler: str) -> dict[str, dict[str, Any]]:
    """Short time-outs everywhere, so that a test does not wait for what production waits for."""
    kafka: dict[str, Any] = {
        "group_protocol": protocol,
        "transaction_timeout_ms": 10_000,
        "revoke_timeout_ms": 2_000,
        # After a broker's restart clients come back at once instead of after up to 10 s.
        "client": {"reconnect.backoff.max.ms": 500},
    }
    if protocol == "classic":
        kafka |= {"session_timeout_ms": 1_500, "consumer": {"heartbeat.interval.ms": 300}}
    return {
        "handlers": {"OrderPlaced": f"tests.support.inventory:{handler}"},
        "message": {"id": ["header:message-id", "payload:/event_id"]},
        "kafka": kafka,
        "database": {"migrations": [str(MIGRATIONS)], "idle_in_transaction_timeout_ms": 2_000},
        # Small batches: many commits, many chances to go wrong, in a short time.
        "batch": {"max_messages": 50, "linger_ms": 5},
        "run": {"stop_timeout_ms": 10_000},
        **{name: dict(table) for name, table in FAILING.items()},
    }


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in changes.items():
        known = result.get(key)
        result[key] = merged(known, value) if isinstance(known, Mapping) and isinstance(value, Mapping) else value
    return result


def write(path: Path, top: Mapping[str, Any], tables: Mapping[str, Any]) -> None:
    """As TOML; what JSON calls a string, number, boolean or list of them, TOML does too.

    What among the tables is none goes to the top, and None takes a table away.
    """
    plain = {key: value for key, value in tables.items() if value is not None and not isinstance(value, Mapping)}
    lines = [f"{key} = {json.dumps(value)}" for key, value in {**top, **plain}.items()]
    _write_tables(lines, "", {name: table for name, table in tables.items() if isinstance(table, Mapping)})
    path.write_text("\n".join(lines) + "\n")


def _write_tables(lines: list[str], prefix: str, tables: Mapping[str, Any]) -> None:
    for name, table in tables.items():
        lines.append(f"\n[{prefix}{name}]")
        lines += [
            f"{_key(key)} = {json.dumps(value)}" for key, value in table.items() if not isinstance(value, Mapping)
        ]
        inner = {key: value for key, value in table.items() if isinstance(value, Mapping)}
        _write_tables(lines, f"{prefix}{name}.", inner)


def _key(name: str) -> str:
    """Dots stay what they are in TOML; a name that TOML would not take as it is goes in quotes."""
    return name if re.fullmatch(r"[A-Za-z0-9_.-]+", name) else json.dumps(name)
