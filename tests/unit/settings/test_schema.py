"""Defaults, profiles, and what belongs to a message type."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from pydantic import ValidationError

from processor.kafka import properties
from processor.settings.load import load
from processor.settings.retention import RetentionSettings
from processor.settings.schema import BatchSettings, RetrySettings
from tests.support.configuration import failing, settings, toml


def test_defaults(tmp_path: Path) -> None:
    loaded = settings(tmp_path)
    assert loaded.source == str(tmp_path / "orders.toml")
    assert loaded.topics == ("orders",)
    assert loaded.message.id == ("header:message-id", "offset")
    assert loaded.batch == BatchSettings()
    assert loaded.handlers["OrderPlaced"].inbox
    assert loaded.kafka.start == "earliest"


def test_settings_cannot_be_changed(tmp_path: Path) -> None:
    loaded = settings(tmp_path)
    with pytest.raises(ValidationError, match="frozen"):
        loaded.batch.max_messages = 1  # type: ignore[misc]
    with pytest.raises(ValidationError, match="frozen"):
        loaded.consumer = "other"  # type: ignore[misc]


def test_example_deployments_are_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    root = Path(__file__).parents[3]
    monkeypatch.chdir(root)
    examples = sorted(Path("config").glob("*.toml"))
    assert [load(example, {}, properties.refusal).consumer for example in examples] == [
        "billing",
        "inventory",
        "payments",
    ]


TOP = 'consumer = "inventory"\ntopic = "orders"\n'


def test_a_profile_sets_values_of_batch_unless_they_are_set_themselves(tmp_path: Path) -> None:
    def batch(top: str = "", table: str = "", **environ: str) -> tuple[int, int]:
        loaded = settings(tmp_path, toml(top=TOP + top, batch=table), environ).batch
        return loaded.max_messages, loaded.linger_ms

    assert batch() == batch('profile = "balanced"') == (1000, 20)
    assert batch('profile = "latency"') == (200, 0)
    assert batch('profile = "throughput"') == batch(PROCESSOR_PROFILE="throughput") == (4000, 200)
    assert batch('profile = "latency"', PROCESSOR_PROFILE="throughput") == (4000, 200)
    assert batch('profile = "throughput"', "max_messages = 7") == (7, 200)
    assert batch('profile = "throughput"', PROCESSOR_BATCH__MAX_MESSAGES="7") == (7, 200)
    assert batch('profile = "throughput"', "max_messages = 8", PROCESSOR_BATCH__LINGER_MS="3") == (8, 3)


def test_concurrency_is_one_by_default(tmp_path: Path) -> None:
    assert settings(tmp_path).concurrency == 1
    assert settings(tmp_path, toml(top=TOP + "concurrency = 64")).concurrency == 64
    assert settings(tmp_path, toml(), {"PROCESSOR_CONCURRENCY": "8"}).concurrency == 8


def test_failed_messages_are_tried_again_and_then_put_aside_by_default(tmp_path: Path) -> None:
    loaded = settings(tmp_path)
    assert loaded.retry == RetrySettings(attempts=5, first_delay_ms=200, max_delay_ms=60_000)
    assert loaded.failure.policy == "dead-letter"
    assert loaded.failure.classes == {}
    assert loaded.run.ready_file is None
    handler = loaded.handlers["OrderPlaced"]
    assert (handler.effect, handler.timeout_ms, handler.retry) == (False, None, None)


def test_a_type_may_have_a_retry_table_of_its_own(tmp_path: Path) -> None:
    own = 'Charge = { call = "a:b", effect = true, timeout_ms = 9, retry = { attempts = 2, first_delay_ms = 5 } }'
    loaded = settings(tmp_path, toml(handlers=f'Other = "a:c"\n{own}') + "\n[retry]\nattempts = 7")
    charge = loaded.handlers["Charge"]
    assert charge.retry == RetrySettings(attempts=2, first_delay_ms=5)
    assert (charge.effect, charge.timeout_ms) == (True, 9)
    assert loaded.handlers["Other"].retry is None
    assert loaded.retry.attempts == 7


def test_dead_letter_topics_are_named_after_topic_and_consumer(tmp_path: Path) -> None:
    def topic_for(pattern: str | None) -> str | None:
        table = "" if pattern is None else f'[failure]\ndead_letter_topic = "{pattern}"'
        return settings(tmp_path, failing(table)).dead_letter_topic("orders")

    assert topic_for(None) == "orders.inventory.dlq"
    assert topic_for("dead-{consumer}") == "dead-inventory"
    assert topic_for("failed") == "failed"
    assert topic_for("") is None


def test_retention_is_days_or_hours_or_for_ever(tmp_path: Path) -> None:
    def retention(table: str = "", **environ: str) -> RetentionSettings:
        return settings(tmp_path, failing(f"[retention]\n{table}"), environ).retention

    week = retention()
    assert (week.span, week.period, week.grain) == (timedelta(days=7), timedelta(hours=7), timedelta(hours=1))
    busy = retention(PROCESSOR_RETENTION__HOURS="12")
    assert (busy.span, busy.period, busy.grain) == (timedelta(hours=12), timedelta(minutes=30), timedelta(minutes=30))
    assert retention("days = 0").span is retention("days = 0").grain is None
