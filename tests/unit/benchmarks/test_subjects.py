"""Who is measured, and with which configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.job import Job
from benchmarks.subjects import SUBJECTS, Processor
from processor.settings.load import load


@pytest.mark.parametrize("subject", [subject for subject in SUBJECTS if isinstance(subject, Processor)])
def test_the_processor_accepts_the_configuration_that_is_written_for_it(subject: Processor, tmp_path: Path) -> None:
    path = tmp_path / "bench.toml"
    path.write_text(subject.config(Job("localhost:9092", "postgresql://localhost/bench", "orders", "out", "bench")))
    settings = load(path, environ={})
    assert settings.consumer == "bench"
    assert settings.batch.max_messages == 2000
