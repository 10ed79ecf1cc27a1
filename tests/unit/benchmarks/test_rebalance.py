"""How long a stall is, and what members' logs say about it."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import rebalance
from benchmarks.job import Job
from benchmarks.rebalance import PROFILES, STATIC, Event, Profile
from processor.settings.load import load

SENT = {"o-0": 8.0, "o-1": 9.5, "o-2": 10.0, "o-3": 11.0, "o-4": 11.5, "o-5": 13.0}
SEEN = {"o-0": 8.9, "o-1": 9.6, "o-2": 11.25, "o-3": 11.25, "o-4": 11.75, "o-5": 20.0}
PLACES = {"o-0": 0, "o-1": 1, "o-2": 0, "o-3": 1, "o-4": 0, "o-5": 1}


def test_a_stall_is_the_longest_delay_of_what_was_sent_around_the_event() -> None:
    event = Event("join", 10.0, 12.0, {0}, ["A: not_ready"])
    stall = rebalance.stall_of("classic", 1500, event, SENT, SEEN, PLACES)
    assert (stall.moved_ms, stall.stayed_ms, stall.p99_ms) == (1250.0, 250.0, 1250.0)
    assert stall.gap_ms == pytest.approx(1650.0)  # o-1 is seen at 9.6, the next at 11.25
    assert stall.noise == ["A: not_ready"]


def test_without_an_event_nothing_moved_and_nothing_before_it_counts() -> None:
    stall = rebalance.stall_of("classic", 1500, Event("calm", 10.5, 12.0), SENT, SEEN, PLACES)
    assert (stall.moved_ms, stall.stayed_ms, stall.gap_ms) == (None, 250.0, 500.0)


def test_what_members_say_is_read_from_their_logs(tmp_path: Path) -> None:
    log = tmp_path / "member.log"
    log.write_text(
        '{"event": "partition_ready", "partition": "orders[x][3]", "level": "info"}\n'
        "Traceback (most recent call last):\n"
        '{"event": "partition_ready", "partition": "orders[x][12]", "level": "warning"}\n'
        '{"event": "starting_over", "reason": "fenced", "level": "warning"}\n'
        '{"event": "partition_halted", "level": "error"}\n'
        '{"event": "partition_re'
    )
    lines = rebalance.said(log)
    assert rebalance.ready_in(lines) == {3, 12}
    assert rebalance.noise_in(lines, "A") == ["A: starting_over fenced", "A: partition_halted"]


@pytest.mark.parametrize("profile", [profile for profile in PROFILES if profile is not STATIC])
def test_the_processor_accepts_the_profiles_of_rebalances(profile: Profile, tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    job = Job("localhost:9092", "postgresql://localhost/bench", "orders", "out", "bench")
    path.write_text(profile.subject().config(job))
    settings = load(path, environ={})
    assert settings.kafka.group_protocol == profile.kafka["group_protocol"]
