"""Processor time per record."""

from __future__ import annotations

import pytest

from benchmarks import cpu


def test_processor_time_is_divided_by_what_was_appended_meanwhile() -> None:
    first, last = cpu.Sample(1000.0, {"subject": 1.0}), cpu.Sample(2000.0, {"subject": 3.0})
    assert cpu.per_record(first, last, [999, 1000, 1500, 1999, 2000]) == {"subject": pytest.approx(2e6 / 3)}
    assert cpu.per_record(first, last, []) == {}
